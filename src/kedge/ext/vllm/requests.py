"""Requests to a vLLM in any process, and the way from records to requests and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from packaging.version import Version

from kedge.config.rollout_engines import LOWEST_VLLM
from kedge.records.errors import ConfigError, RolloutError
from kedge.records.types import PromptBatch, Sampling
from kedge.rollout.embedded.sampling import StopStrings
from kedge.rollout.engines import TokenResponse

_MIN_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this
_MOST_ALLOWED = 1024  # tokens recorded per sampled token, unless top_k is set
_TIES = 12  # extra tokens recorded, plus half of top_k, since vLLM keeps ties with the last token


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Request for one response."""

    prompt: list[int]
    params: dict[str, Any]  # keyword arguments of vllm.SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One sampled response."""

    tokens: NDArray[np.int32]  # including the stop token
    logprobs: NDArray[np.float32]  # per token, nats, under the sampling distribution
    stopped: bool  # True: ended by a stop token or stop string, not by the length limit
    # versions of the weights that vLLM reports (-1: not Kedge's), in order, each with its tokens
    versions: Sequence[tuple[int, int]]
    # [tokens, K]; tokens that could have been sampled, then -1; None: all
    allowed: NDArray[np.int32] | None = None
    prompt_logprobs: tuple[float, ...] = ()  # nats, for all prompt tokens but the first; optional


def check_version(version: str, where: str) -> None:
    """Check that a vLLM is new enough."""
    if Version(version).release < Version(LOWEST_VLLM).release:
        raise ConfigError(
            f"{where} has version {version}, but Kedge needs vLLM {LOWEST_VLLM} or newer; upgrade"
            " it, for example with pip install -U vllm in its environment"
        )


def parse_version(text: str | None) -> int:
    """The number in vLLM's name of a weight version; -1 for a name not set by Kedge."""
    return int(text) if text is not None and text.lstrip("-").isdigit() else -1


def allowed_tokens(top: Sequence[tuple[int, float]]) -> list[int]:
    """Tokens of positive probability among the most likely ones.

    ``top`` has token and log-probability (nats) after top-k, top-p and min-p; excluded tokens have
    -inf, or -9999 over HTTP; NaN remains, for ``build_rollout`` to report.
    """
    tokens = {token: logprob for token, logprob in top if not logprob <= -9999}
    total = sum(map(exp, tokens.values()))
    if total < 0.999:
        raise RolloutError(
            f"vLLM could sample more tokens than the {len(tokens)} most likely ones that it"
            f" reports, which have probability {total:.3g}: top_p and min_p do not limit the"
            " number of tokens, and top_k keeps all that tie with the last; set top_k, or a lower"
            " one"
        )
    return list(tokens)


def allowed_matrix(tops: Sequence[Sequence[tuple[int, float]]]) -> NDArray[np.int32]:
    """``GenerationResult.allowed`` of the most likely tokens, see ``allowed_tokens``."""
    rows = [allowed_tokens(top) for top in tops]
    allowed = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
    for i, row in enumerate(rows):
        allowed[i, : len(row)] = row
    return allowed


def build_requests(
    prompts: PromptBatch, sampling: Sampling, seed: int, *, vocabulary: int
) -> list[GenerationRequest]:
    """One request per row, each with its seed."""
    params = build_sampling_params(sampling, vocabulary=vocabulary)
    tokens, masks = prompts.ids.cpu(), prompts.mask.cpu()  # one copy instead of one per row
    rows = zip(tokens, masks, prompts.row.tolist(), prompts.limits(sampling).tolist(), strict=True)
    return [
        GenerationRequest(
            prompt=ids[mask].tolist(),
            params=params | {"seed": row_seed(seed, row), "max_tokens": limit},
        )
        for ids, mask, row, limit in rows
    ]


def build_sampling_params(sampling: Sampling, *, vocabulary: int) -> dict[str, Any]:
    """Keyword arguments of ``vllm.SamplingParams``, without the seed.

    With top-k, top-p or min-p, vLLM also reports log-probabilities of the most likely tokens,
    which show which tokens could be sampled.
    """
    if 0 < sampling.temperature < _MIN_TEMPERATURE:
        raise ConfigError(
            f"temperature={sampling.temperature} must be 0 (greedy) or at least {_MIN_TEMPERATURE}"
            " with vLLM; raise it, or use rollout_engine='embedded'"
        )
    recorded = 0  # the sampled token only
    if sampling.truncates and sampling.temperature > 0:
        k = sampling.top_k
        recorded = min(k + k // 2 + _TIES if k else _MOST_ALLOWED, vocabulary)
    return {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        "ignore_eos": True,  # only stop_token_ids end responses
        "logprobs": recorded,
        "detokenize": bool(sampling.stop_strings),
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }


def row_seed(seed: int, row: int) -> int:
    """Seed of one row in [0, 2^56), hashed so that rows and seeds do not share streams."""
    digest = hashlib.blake2b(f"{seed} {row}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def read_responses(
    results: Sequence[GenerationResult],
    sampling: Sampling,
    *,
    tokenizer: Any,
    vocabulary: int,
) -> list[TokenResponse]:
    """Check results, and convert them; a response ends where its first stop string does."""
    stops = StopStrings(sampling, tokenizer) if sampling.stop_strings else None
    ends = [_find_end(result, stops) for result in results]
    lengths = [length for length, _ in ends]
    if min(lengths) < 1 or max(lengths) > sampling.max_new_tokens:
        raise RolloutError(
            f"vLLM returned responses of {min(lengths)} to {max(lengths)} tokens, expected 1 to"
            f" max_new_tokens={sampling.max_new_tokens}"
        )
    ids = np.concatenate([result.tokens for result in results])
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise RolloutError(
            f"vLLM returned token ids from {ids.min()} to {ids.max()}, but the policy has"
            f" {vocabulary} tokens: vLLM serves another model"
        )
    responses = []
    for result, (length, terminated) in zip(results, ends, strict=True):
        # Greedy: only the sampled token.
        allowed = result.tokens[:, None] if result.allowed is None else result.allowed
        responses.append(
            TokenResponse(
                tokens=torch.as_tensor(result.tokens[:length], dtype=torch.int64),
                # Rounding can make the log of 1 slightly positive.
                logprobs=torch.as_tensor(result.logprobs[:length]).float().clamp(max=0.0),
                allowed=torch.as_tensor(allowed[:length], dtype=torch.int64)
                if sampling.truncates
                else None,
                terminated=terminated,
                versions=result.versions,
            )
        )
    return responses


def _find_end(result: GenerationResult, stops: StopStrings | None) -> tuple[int, bool]:
    """Length of the response, and whether it was terminated rather than truncated.

    vLLM detects a stop string some tokens late if a character spans several tokens, so its end is
    searched again as in the embedded engine.
    """
    total = len(result.tokens)
    if stops is None:
        return total, result.stopped
    tokens = [int(token) for token in result.tokens]
    for length in range(1, total + 1):
        if stops.complete(tokens[:length]):
            return length, True
    return total, result.stopped
