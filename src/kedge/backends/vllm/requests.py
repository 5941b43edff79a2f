"""Between the core's records and vLLM's requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.backends.hf.stopping import StopStrings
from kedge.backends.vllm.service import GenerationRequest, GenerationResult
from kedge.errors import ConfigError, RolloutError
from kedge.types import PromptBatch, Rollout, Sampling

_COLDEST = 0.01  # vLLM raises lower temperatures to it


def build_requests(prompts: PromptBatch, sampling: Sampling, seed: int) -> list[GenerationRequest]:
    """One request per row, each with a seed of its own.

    Raises:
        ConfigError: a temperature that vLLM would change.
    """
    params = build_sampling_params(sampling)
    return [
        GenerationRequest(prompt=ids[mask].tolist(), params=params | {"seed": row_seed(seed, row)})
        for ids, mask, row in zip(prompts.ids, prompts.mask, prompts.row.tolist(), strict=True)
    ]


def build_sampling_params(sampling: Sampling) -> dict[str, Any]:
    """The keyword arguments of ``vllm.SamplingParams``, without the seed.

    Raises:
        ConfigError: a temperature that vLLM would change.
    """
    if 0 < sampling.temperature < _COLDEST:
        raise ConfigError(
            f"temperature={sampling.temperature}; vLLM samples at {_COLDEST} or above, or greedily"
            f" at 0: raise it, or use rollout_engine='embedded'"
        )
    return {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        "ignore_eos": True,  # only the stop tokens that were asked for end a response
        "logprobs": 0,  # of the sampled token alone
        "detokenize": bool(sampling.stop_strings),
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }


def row_seed(seed: int, row: int) -> int:
    """The seed of one row, from 0 to 2^56 - 1: rows and seeds share no streams."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {row}".encode(), digest_size=7).digest())


def build_rollout(
    answers: Sequence[GenerationResult],
    prompts: PromptBatch,
    sampling: Sampling,
    *,
    pad_id: int,
    tokenizer: Any,
    extra_slot: bool,
) -> Rollout:
    """The record of the answers, in the order of the prompts.

    Raises:
        RolloutError: vLLM answered nothing, too much, or NaN.
    """
    cut = [_ended(a, stops) for stops in [_stops(sampling, tokenizer)] for a in answers]
    lengths = [length for length, _ in cut]
    if min(lengths) < 1 or max(lengths) > sampling.max_new_tokens:
        raise RolloutError(
            f"vLLM answered {min(lengths)} to {max(lengths)} tokens where 1 to"
            f" max_new_tokens={sampling.max_new_tokens} were asked for"
        )
    size = min(max(lengths) + extra_slot, sampling.max_new_tokens)
    rows = len(answers)
    ids = torch.full((rows, size), pad_id, dtype=torch.int64)
    logprobs = torch.zeros(rows, size)
    for i, (answer, length) in enumerate(zip(answers, lengths, strict=True)):
        ids[i, :length] = torch.tensor(answer.tokens[:length])
        logprobs[i, :length] = torch.tensor(answer.logprobs[:length])
    if logprobs.isnan().any():
        row = int(logprobs.isnan().any(1).nonzero()[0])
        raise RolloutError(
            f"vLLM returned NaN for row {row}, sampled by version {answers[row].version}; lower the"
            " learning rate, or check the weights that were loaded"
        )
    if sampling.temperature == 0:
        logprobs = torch.zeros_like(logprobs)  # the most likely token is drawn with certainty
    present = torch.arange(size) < torch.tensor(lengths)[:, None]
    device = prompts.ids.device
    return Rollout(
        prompts=prompts,
        ids=ids.to(device),
        loss_mask=present.to(device),
        response_mask=present.clone().to(device),
        terminated=torch.tensor([done for _, done in cut], device=device),
        version=torch.tensor([a.version for a in answers], device=device),
        behavior_logprobs=_at_most_0(logprobs).to(device),
    )


def _at_most_0(logprobs: Tensor) -> Tensor:
    """Rounding can lift the logarithm of a probability of 1 a hair above 0."""
    return logprobs.clamp(max=0.0)


def _stops(sampling: Sampling, tokenizer: Any) -> StopStrings | None:
    return StopStrings(sampling, tokenizer) if sampling.stop_strings else None


def _ended(answer: GenerationResult, stops: StopStrings | None) -> tuple[int, bool]:
    """Length of the response, and whether it ended by itself.

    vLLM notices a stop string some tokens late where a character spans several of them, so the
    place is found again by the rule that the embedded engine follows.
    """
    whole = len(answer.tokens)
    if stops is None:
        return whole, answer.stopped
    for length in range(1, whole + 1):
        if stops.completed([answer.tokens[:length]])[0]:
            return length, True
    return whole, answer.stopped
