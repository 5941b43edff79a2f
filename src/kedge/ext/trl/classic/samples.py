"""Queries, responses and scores of ``step``: checks, padding, and the engine's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kedge.math.running import RunningMoments
from kedge.records.errors import DataError
from kedge.records.types import PromptBatch, RewardOutput, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One checked batch."""

    queries: list[Tensor]  # int64 [P_i] each
    responses: list[Tensor]  # int64 [R_i] each, without a decoder's start token
    scores: RewardOutput  # one per response, one per token, or both
    masks: list[Tensor]  # bool [R_i] each; trained tokens


def total_scores(scores: RewardOutput) -> Tensor:
    """Total score of each response, float32 [B]."""
    tokens = scores.token_rewards
    return scores.scores if tokens is None else scores.scores + tokens.sum(1)


def scale_scores(
    scores: RewardOutput, running: RunningMoments, *, scale: bool, norm: bool, clip: float | None
) -> RewardOutput:
    """Scores divided by the running deviation of their sums, then clipped, if enabled.

        s / (std + eps)    or, with ``norm``, (s - mean) / (std + eps)     then to [-clip, clip]

    The moments are updated with this batch first.  For a response scored per token, the mean is
    subtracted at its end; the clip applies to each score separately.
    """
    if scale:
        running.update(total_scores(scores))
        if norm:
            scores = replace(scores, scores=scores.scores - running.mean)
        scores = scores.divide(running.std + torch.finfo(scores.scores.dtype).eps)
    if clip is not None:
        tokens = scores.token_rewards
        tokens = None if tokens is None else tokens.clamp(-clip, clip)
        scores = replace(scores, scores=scores.scores.clamp(-clip, clip), token_rewards=tokens)
    return scores


def check_samples(
    batch_size: int, queries: Any, responses: Any, scores: Any, masks: Any = None
) -> None:
    """Validate the arguments of ``step``; raises DataError with the row and the expected shape."""
    arguments = {"queries": queries, "responses": responses, "scores": scores}
    if masks is not None:
        arguments["response_masks"] = masks
    for name, tensors in arguments.items():
        _check_list(name, tensors, batch_size)
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


def _check_list(name: str, tensors: Any, batch_size: int) -> None:
    if not isinstance(tensors, list):
        raise DataError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
    for i, x in enumerate(tensors):
        if not isinstance(x, Tensor):
            raise DataError(f"{name}[{i}] must be a tensor, got {type(x).__name__}")
        if x.dim() != 1 and name in ("queries", "responses"):
            raise DataError(f"{name}[{i}] must have shape (length,), got {tuple(x.shape)}")
        if not x.numel() and name == "queries":
            raise DataError(f"queries[{i}] must have at least one token")
    if len(tensors) != batch_size:
        raise DataError(
            f"{name} must have batch_size={batch_size} entries, got {len(tensors)}; pass that "
            "many, or change PPOConfig.batch_size"
        )


def build_samples(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Sequence[Tensor],
    masks: Sequence[Tensor] | None = None,
    *,
    start: int | None = None,
) -> Samples:
    """Convert checked arguments of ``step`` to a record on the CPU.

    ``start`` is a decoder's start token, removed from responses that begin with it.
    """
    if masks is None:
        masks = [torch.ones_like(r) for r in responses]
    whole, tokens, rows, row_masks = [], [], [], []
    for response, mask, score in zip(responses, masks, scores, strict=True):
        cut = int(begins_with(response, start))
        rows.append(response[cut:].long().cpu())
        row_masks.append(mask[cut:].bool().cpu())
        numbers = score.detach().float().cpu().reshape(-1)
        dense = len(numbers) > 1
        whole.append(numbers.new_zeros(()) if dense else numbers[0])
        tokens.append(numbers[cut:] if dense else numbers.new_zeros(len(rows[-1])))
    return Samples(
        queries=[q.long().cpu() for q in queries],
        responses=rows,
        masks=row_masks,
        scores=RewardOutput(
            scores=torch.stack(whole),
            valid=torch.ones(len(whole), dtype=torch.bool),
            token_rewards=pad_tensors(tokens) if any(x.numel() > 1 for x in scores) else None,
        ),
    )


def build_rollout(
    samples: Samples, *, pad: int, eos: int | None, first_row: int, version: int
) -> Rollout:
    """The samples as a ``Rollout``; a response that ends with ``eos`` is terminated.

    ``first_row`` is the index of the first row in the batch of all ranks.
    """
    queries, responses = samples.queries, samples.responses
    if not any(map(len, responses)):
        raise DataError("all responses of this batch are empty; at least one must have a token")
    row = torch.arange(first_row, first_row + len(queries))
    prompts = PromptBatch(
        ids=pad_tensors(queries, pad, left=True),
        mask=pad_tensors([torch.ones_like(q, dtype=torch.bool) for q in queries], left=True),
        group=row,
        row=row,
    )
    terminated = [len(r) > 0 and eos is not None and int(r[-1]) == eos for r in responses]
    return Rollout(
        prompts=prompts,
        ids=pad_tensors(responses, pad),
        loss_mask=pad_tensors(samples.masks),
        response_mask=pad_tensors([torch.ones_like(r, dtype=torch.bool) for r in responses]),
        terminated=torch.tensor(terminated),
        policy_version=torch.full_like(row, version),
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


def pad_tensors(rows: Sequence[Tensor], fill: int = 0, *, left: bool = False) -> Tensor:
    """Rows [n_i] as one tensor [B, max n], padded on the right or left."""
    side = "left" if left else "right"
    return pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side=side)


def begins_with(response: Tensor, start: int | None) -> bool:
    """Whether a response int64 [R] begins with the decoder's start token."""
    return start is not None and len(response) > 0 and int(response[0]) == start


def with_start(response: Tensor, start: int | None) -> Tensor:
    """A response int64 [R] that begins with the decoder's start token, if there is one."""
    if start is None or begins_with(response, start):
        return response
    return torch.cat([response.new_tensor([start]), response])


def response_mask(
    inputs: Mapping[str, Tensor],
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    masks: Sequence[Tensor] | None,
    *,
    start: int | None,
) -> Tensor:
    """Int64 [B, T]: 1 where the token at t + 1 of the (decoder's) inputs is in the response.

    ``inputs`` may be padded on either side; ``masks`` [R_i] select trained tokens, None: all.
    """
    whole = inputs["attention_mask" if start is None else "decoder_attention_mask"]
    out = torch.zeros_like(whole[:, 1:])
    for i, (row, query, response) in enumerate(zip(whole, queries, responses, strict=True)):
        first = int(row.argmax())  # index of the first real token under left padding
        skip = int(begins_with(response, start))
        begin = first + (len(query) - 1 if start is None else 0)
        count = len(response) - skip
        trained = torch.ones(count) if masks is None else masks[i][skip:]
        out[i, begin : begin + count] = trained.to(out)
    return out
