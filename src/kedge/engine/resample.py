"""Dynamic sampling: groups that teach nothing are sampled anew, for other prompts.

Responses to one prompt that all score the same have advantage 0.  Yu et al. 2025 (DAPO,
arXiv:2503.14476), section 3.2; there until the batch is full, here for a bounded number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from kedge.math.advantage import group_std
from kedge.math.sequences import widened
from kedge.types import Judgement, PromptBatch, Rollout

REPLACED = "rollout/resampled_groups"
_FIRST = 2**40  # steps from here on name prompts of no training step
Draw = Callable[[PromptBatch, int], tuple[Rollout, Judgement]]
Columns = Mapping[str, Sequence[object]]
T = TypeVar("T", Rollout, Judgement)


def spare_step(step: int, turn: int, rounds: int) -> int:
    """The step whose prompts stand in for those of ``step`` in round ``turn`` of ``rounds``."""
    return _FIRST + step * rounds + turn


def refill(
    rollout: Rollout,
    judgement: Judgement,
    *,
    prompts: Callable[[int], PromptBatch],
    draw: Draw,
    rounds: int,
) -> tuple[Rollout, Judgement, int]:
    """The batch with new groups in place of those whose scores do not differ.

    Args:
        rollout: responses, several to each prompt.
        judgement: their scores.
        prompts: round -> a batch of other prompts, with the groups and rows of this one.
        draw: samples and scores some of their rows in a round.
        rounds: how often at most.

    Returns:
        Rollout, judgement, and how many groups were replaced.
    """
    replaced = 0
    for turn in range(rounds):
        group = rollout.prompts.group
        bare = ~(group_std(judgement.scores, group, judgement.valid) > 0)
        index = bare.nonzero().squeeze(1)
        if not len(index):
            break
        fresh, verdict = draw(rows_of(prompts(turn), index), turn)
        rollout = replace(
            _put(rollout, fresh, index), prompts=_put_prompts(rollout.prompts, fresh.prompts, index)
        )
        judgement = _put(judgement, verdict, index)
        replaced += len(group[index].unique())
    return rollout, judgement, replaced


def rows_of(prompts: PromptBatch, index: Tensor) -> PromptBatch:
    """The prompts of the rows ``index`` int64 [n]."""
    picked = index.tolist()
    return PromptBatch(
        ids=prompts.ids[index],
        mask=prompts.mask[index],
        group=prompts.group[index],
        row=prompts.row[index],
        columns={name: [column[i] for i in picked] for name, column in prompts.columns.items()},
    )


def _put(old: T, new: T, index: Tensor) -> T:
    """``old`` with the rows ``index`` of every tensor taken from ``new``."""
    changed: dict[str, object] = {}
    for f in fields(old):
        mine, other = getattr(old, f.name), getattr(new, f.name)
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            fill = -1 if f.name == "support" else 0
            changed[f.name] = _placed(mine, other, index, fill=fill)
        elif f.name == "said":
            changed[f.name] = {**mine, **other}  # the last round counts
        elif f.name == "extras":
            changed[f.name] = _put_columns(mine, other, index)
        elif isinstance(mine, dict):
            changed[f.name] = {k: _placed(x, other[k], index) for k, x in mine.items()}
        elif f.name != "prompts" and mine is not other:
            raise ValueError(f"{f.name} is there for some rows of a batch and missing for others")
    return replace(old, **changed)  # type: ignore[arg-type]


def _put_prompts(old: PromptBatch, new: PromptBatch, index: Tensor) -> PromptBatch:
    return PromptBatch(
        ids=_placed(old.ids, new.ids, index, left=True),
        mask=_placed(old.mask, new.mask, index, left=True),
        group=old.group,
        row=old.row,
        columns=_put_columns(old.columns, new.columns, index),
    )


def _put_columns(old: Columns, new: Columns, index: Tensor) -> Columns:
    where = {row: i for i, row in enumerate(index.tolist())}
    return {
        name: [new[name][where[i]] if i in where else x for i, x in enumerate(column)]
        for name, column in old.items()
        if name in new
    }


def _placed(
    mine: Tensor, other: Tensor, index: Tensor, *, left: bool = False, fill: int = 0
) -> Tensor:
    """``mine`` with the rows ``index`` of ``other``, both padded to the wider of them."""
    wide = [max(a, b) for a, b in zip(mine.shape[1:], other.shape[1:], strict=True)]
    mine, other = (widened(x, wide, left=left, fill=fill) for x in (mine, other))
    return torch.index_copy(mine, 0, index.to(mine.device), other)
