"""Converts the arguments of ``step`` (lists of tensors) to the engine's records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.classic.inputs import padded
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

    ``start`` is a decoder's start token, removed from responses that begin with it.
    """
    if masks is None:
        masks = [torch.ones_like(r) for r in responses]
    whole, tokens, rows, kept_masks = [], [], [], []
    for response, mask, score in zip(responses, masks, scores, strict=True):
        cut = int(start is not None and len(response) > 0 and int(response[0]) == start)
        rows.append(response[cut:].long().cpu())
        kept_masks.append(mask[cut:].bool().cpu())
        numbers = score.detach().float().cpu().reshape(-1)
        dense = len(numbers) > 1
        whole.append(numbers.new_zeros(()) if dense else numbers[0])
        tokens.append(numbers[cut:] if dense else numbers.new_zeros(len(rows[-1])))
    return Samples(
        queries=[q.long().cpu() for q in queries],
        responses=rows,
        masks=kept_masks,
        scores=Scores(
            whole=torch.stack(whole),
            tokens=padded(tokens) if any(x.numel() > 1 for x in scores) else None,
        ),
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


def build_rollout(
    samples: Samples, *, pad: int, eos: int | None, first_row: int, version: int
) -> Rollout:
    """The samples as a ``Rollout``; a response that ends with ``eos`` is terminated.

    ``first_row`` is the index of the first row in the batch of all ranks.

    Raises:
        DataError: all responses are empty.
    """
    queries, responses = samples.queries, samples.responses
    if not any(map(len, responses)):
        raise DataError("all responses of this batch are empty; at least one must have a token")
    row = torch.arange(first_row, first_row + len(queries))
    prompts = PromptBatch(
        ids=padded(queries, pad, left=True),
        mask=padded([torch.ones_like(q, dtype=torch.bool) for q in queries], left=True),
        group=row,
        row=row,
    )
    terminated = [len(r) > 0 and eos is not None and int(r[-1]) == eos for r in responses]
    return Rollout(
        prompts=prompts,
        ids=padded(responses, pad),
        loss_mask=padded(samples.masks),
        response_mask=padded([torch.ones_like(r, dtype=torch.bool) for r in responses]),
        terminated=torch.tensor(terminated),
        version=torch.full_like(row, version),
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
