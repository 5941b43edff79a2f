"""Converts the arguments of ``step`` (lists of tensors) to the engine's records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.classic.scores import Scores
from kedge.errors import DataError
from kedge.types import PromptBatch, RewardOutput, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One checked batch."""

    queries: list[Tensor]  # int64 [P_i] each
    responses: list[Tensor]  # int64 [R_i] each, without a decoder's start token
    scores: Scores
    masks: list[Tensor]  # bool [R_i] each; trained tokens


def check_samples(
    batch_size: int, queries: Any, responses: Any, scores: Any, masks: Any = None
) -> None:
    """Validate the arguments of ``step``.

    Args:
        batch_size: expected number of samples.
        queries: list of int64 [P_i].
        responses: list of int64 [R_i].
        scores: list of tensors: one number each, or one per response token.
        masks: list of [R_i]; None: all response tokens are trained.

    Raises:
        DataError: an invalid argument; names the row and the expected shape.
    """
    arguments = {"queries": queries, "responses": responses, "scores": scores}
    if masks is not None:
        arguments["response_masks"] = masks
    for name, tensors in arguments.items():
        _check_list(name, tensors, batch_size)
    _check_rows(queries, responses)
    for i, (response, score) in enumerate(zip(responses, scores, strict=True)):
        if masks is not None and masks[i].shape != response.shape:
            raise DataError(
                f"response_masks[{i}] must have the shape of its response {tuple(response.shape)}, "
                f"got {tuple(masks[i].shape)}"
            )
        dense = score.dim() == 1 and score.numel() > 1
        if score.dim() > 1 or (dense and len(score) != len(response)) or not score.numel():
            raise DataError(
                f"scores[{i}] must be one number or one per token of its response "
                f"({len(response)}), got shape {tuple(score.shape)}"
            )
        if not bool(score.isfinite().all()):
            raise DataError(f"scores[{i}] must be finite, got {score.tolist()}")


def samples_of(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Sequence[Tensor],
    masks: Sequence[Tensor] | None = None,
    *,
    start: int | None = None,
) -> Samples:
    """Checked arguments of ``step`` as a record on the CPU.

    Args:
        queries: int64 [P_i] each.
        responses: int64 [R_i] each; of an encoder-decoder with or without its start token.
        scores: one number each, or one per response token.
        masks: [R_i] each; None: all response tokens are trained.
        start: the decoder's start token, removed from responses that begin with it.
    """
    given_masks = (
        [torch.ones_like(r, dtype=torch.bool) for r in responses] if masks is None else masks
    )
    whole, tokens = [], []
    rows, kept_masks = [], []
    for response, mask, score in zip(responses, given_masks, scores, strict=True):
        cut = int(start is not None and len(response) > 0 and int(response[0]) == start)
        rows.append(response[cut:].long().cpu())
        kept_masks.append(mask[cut:].bool().cpu())
        numbers = score.detach().float().cpu().reshape(-1)
        dense = len(numbers) > 1
        whole.append(numbers.new_zeros(()) if dense else numbers[0])
        tokens.append(numbers[cut:] if dense else None)
    return Samples(
        queries=[q.long().cpu() for q in queries],
        responses=rows,
        masks=kept_masks,
        scores=Scores(whole=torch.stack(whole), tokens=_pad_token_scores(tokens, rows)),
    )


def _check_list(name: str, tensors: Any, size: int) -> None:
    if not isinstance(tensors, list):
        raise DataError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
    wrong = next((i for i, x in enumerate(tensors) if not isinstance(x, Tensor)), None)
    if wrong is not None:
        raise DataError(f"{name}[{wrong}] must be a tensor, got {type(tensors[wrong]).__name__}")
    if len(tensors) != size:
        raise DataError(
            f"{name} must have batch_size={size} entries, got {len(tensors)}; pass that many, or "
            "change PPOConfig.batch_size"
        )


def _check_rows(queries: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
    for name, rows in (("queries", queries), ("responses", responses)):
        for i, row in enumerate(rows):
            if row.dim() != 1:
                raise DataError(f"{name}[{i}] must have shape (length,), got {tuple(row.shape)}")
    empty = [i for i, q in enumerate(queries) if not len(q)]
    if empty:
        raise DataError(f"queries must have at least one token each; empty: {empty}")


def _pad_token_scores(
    tokens: Sequence[Tensor | None], responses: Sequence[Tensor]
) -> Tensor | None:
    if all(x is None for x in tokens):
        return None
    out = torch.zeros(len(tokens), max(map(len, responses)))
    for row, x in zip(out, tokens, strict=True):
        if x is not None:
            row[: len(x)] = x
    return out


def build_rollout(
    samples: Samples, *, pad: int, eos: int | None, first_row: int, version: int
) -> Rollout:
    """The samples as a ``Rollout``.

    Args:
        samples: B rows.
        pad: padding token id; masks never depend on it.
        eos: a response that ends with it is terminated.
        first_row: index of the first row in the batch of all ranks.
        version: policy version that sampled; -1: unknown.

    Raises:
        DataError: all responses are empty.
    """
    queries, responses = samples.queries, samples.responses
    width, length = max(map(len, queries)), max(map(len, responses))
    if not length:
        raise DataError("all responses of this batch are empty; at least one must have a token")
    size = len(queries)
    prompt_ids, ids = torch.full((size, width), pad), torch.full((size, length), pad)
    mask, response_mask = torch.zeros(2, size, length, dtype=torch.bool)
    for i, (q, r, m) in enumerate(zip(queries, responses, samples.masks, strict=True)):
        prompt_ids[i, width - len(q) :] = q
        ids[i, : len(r)] = r
        mask[i, : len(r)] = m
        response_mask[i, : len(r)] = True
    sizes = torch.tensor([len(q) for q in queries])
    row = torch.arange(first_row, first_row + size)
    prompts = PromptBatch(
        ids=prompt_ids,
        mask=torch.arange(width) >= width - sizes[:, None],
        group=row,
        row=row,
    )
    terminated = [len(r) > 0 and eos is not None and int(r[-1]) == eos for r in responses]
    return Rollout(
        prompts=prompts,
        ids=ids,
        loss_mask=mask,
        response_mask=response_mask,
        terminated=torch.tensor(terminated),
        version=torch.full((size,), version),
    )


def build_reward_output(scores: Scores) -> RewardOutput:
    """Scores as a ``RewardOutput``."""
    return RewardOutput(
        scores=scores.whole,
        valid=torch.ones_like(scores.whole, dtype=torch.bool),
        token_rewards=scores.tokens,
    )


def on_grid(x: Tensor, present: Tensor, queries: Sequence[Tensor] | None) -> Tensor:
    """Per-token values float [B, R] on the grid of the statistics.

    For a causal model the grid is [B, S - 1], where S is the longest query with its response:
    entry t is for the token at t + 1, so a response begins at the length of its query minus one.
    For an encoder-decoder (``queries`` is None) it is the response itself.  Other entries are 0.
    """
    if queries is None:
        return x
    starts = [len(q) - 1 for q in queries]
    lengths = present.sum(1).tolist()
    width = max(s + n for s, n in zip(starts, lengths, strict=True))
    out = x.new_zeros(len(x), width)
    for row, numbers, s, n in zip(out, x, starts, lengths, strict=True):
        row[s : s + n] = numbers[:n]
    return out
