"""Splits records by rows and joins them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from kedge.types import PromptBatch, Rollout, with_unique_groups


def split_rows(rows: int, parts: int) -> list[slice]:
    """Consecutive slices of nearly equal size; fewer than ``parts`` if there are fewer rows.

    >>> [(s.start, s.stop) for s in split_rows(5, 2)]
    [(0, 2), (2, 5)]
    """
    ends = [rows * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(ends) if b > a]


def without_columns(prompts: PromptBatch) -> PromptBatch:
    """Prepare prompts for another process: on the CPU, without dataset columns."""
    return replace(prompts.to("cpu"), columns={})


def stack_prompts(parts: Sequence[PromptBatch]) -> PromptBatch:
    """Stack the rows of all parts; groups of different parts stay apart even with equal ids."""
    return PromptBatch.cat(with_unique_groups(parts))


def join_rollouts(prompts: PromptBatch, parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Concatenate the rollouts of consecutive rows of ``prompts``, padded to the widest.

    Raises:
        RolloutError: only some engines record log-probabilities.
    """
    names = [f"rollout engine {i} of {len(parts)}" for i in range(len(parts))]
    whole = Rollout.cat([part.to(prompts.ids.device) for part in parts], names=names)
    ids = whole.ids.masked_fill(~whole.response_mask, pad_id)
    return replace(whole, prompts=prompts, ids=ids)


def with_prompts(rollout: Rollout, prompts: PromptBatch) -> Rollout:
    """Restore the prompts and columns of a rollout from another process."""
    return replace(rollout.to(prompts.ids.device), prompts=prompts)


def slice_rollout(rollout: Rollout, rows: slice, prompts: PromptBatch, extra: int) -> Rollout:
    """The rows that answer ``prompts``, as wide as their longest response plus ``extra`` slots."""
    part = replace(rollout.rows(rows), prompts=prompts)
    return part.trim(int(part.response_mask.sum(1).max()) + extra)
