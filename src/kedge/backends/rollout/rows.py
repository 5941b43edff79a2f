"""Records cut into shares of rows, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from kedge.types import PromptBatch, Rollout, separated


def shares(rows: int, parts: int) -> list[slice]:
    """Consecutive rows, as even as they go; fewer shares than asked for where rows are few.

    >>> [(s.start, s.stop) for s in shares(5, 2)]
    [(0, 2), (2, 5)]
    """
    ends = [rows * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(ends) if b > a]


def bare(prompts: PromptBatch) -> PromptBatch:
    """The prompts as an engine elsewhere needs them: on the CPU, without dataset columns."""
    return replace(prompts.to("cpu"), columns={})


def stack_prompts(parts: Sequence[PromptBatch]) -> PromptBatch:
    """The rows of all parts; groups of different parts stay apart, though their numbers agree."""
    return PromptBatch.cat(separated(parts))


def join(prompts: PromptBatch, parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """The rollout of all prompts out of those of its shares, in order, as wide as the widest.

    Raises:
        RolloutError: some engines record log-probabilities and others do not.
    """
    names = [f"rollout engine {i} of {len(parts)}" for i in range(len(parts))]
    whole = Rollout.cat([part.to(prompts.ids.device) for part in parts], names=names)
    ids = whole.ids.masked_fill(~whole.response_mask, pad_id)
    return replace(whole, prompts=prompts, ids=ids)


def answering(found: Rollout, prompts: PromptBatch) -> Rollout:
    """What an engine elsewhere sampled, for the prompts as they were asked for."""
    return replace(found.to(prompts.ids.device), prompts=prompts)


def build_share(rollout: Rollout, rows: slice, prompts: PromptBatch, spare: int) -> Rollout:
    """Some of the rows for the prompts they answer, as wide as their longest and ``spare`` more."""
    part = replace(rollout.rows(rows), prompts=prompts)
    return part.trim(int(part.response_mask.sum(1).max()) + spare)
