"""Samples of several pieces as the one sample of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from kedge.engine.drawing import Sample
from kedge.math.sequences import widened
from kedge.types import Judgement, Metrics, PromptBatch, Rollout

T = TypeVar("T", Rollout, Judgement)
_UNUSED = {"support": -1}  # what stands in empty places, where that is not 0


def pieces_of(batch: PromptBatch, count: int) -> list[Tensor]:
    """The rows of a batch in ``count`` pieces of equally many whole groups; each int64 [n].

    Raises:
        ValueError: the groups do not divide.
    """
    names, group = batch.group.unique(return_inverse=True)
    if len(names) % count:
        raise ValueError(f"{len(names)} prompts cannot be cut into {count} equal pieces")
    piece = group // (len(names) // count)
    return [(piece == k).nonzero().squeeze(1) for k in range(count)]


def joined(samples: Sequence[Sample], like: PromptBatch) -> Sample:
    """One sample out of several, padded to the widest of them.

    Groups are named anew, after those of ``like``: pieces of different steps may have used the same
    names.  Seconds and counts add.

    Args:
        samples: with whole groups each.
        like: the prompts of the step; its rows and groups give the names.
    """
    if len(samples) == 1:
        rollout, judgement, times = samples[0]
        return replace(rollout, prompts=_renamed(rollout.prompts, like)), judgement, times
    rollouts, judgements = [s[0] for s in samples], [s[1] for s in samples]
    offset, shifted = 0, []
    for rollout in rollouts:
        names, group = rollout.prompts.group.unique(return_inverse=True)
        shifted.append(replace(rollout.prompts, group=group + offset))
        offset += len(names)
    prompts = PromptBatch(
        ids=_stacked([p.ids for p in shifted], left=True),
        mask=_stacked([p.mask for p in shifted], left=True),
        group=torch.cat([p.group for p in shifted]),
        row=torch.cat([p.row for p in shifted]),
        columns={
            name: [value for p in shifted for value in p.columns[name]]
            for name in shifted[0].columns
        },
    )
    rollout = _joined_fields(rollouts, prompts=_renamed(prompts, like))
    parts = {
        name: torch.cat([_part(j, name) for j in judgements])
        for name in dict.fromkeys(name for j in judgements for name in j.parts)
    }
    judgement = _joined_fields(
        judgements, parts=parts, said=_sums(judgements), extras=_rows(judgements)
    )
    spent: dict[str, float] = {}
    for _, _, took in samples:
        for name, x in took.items():
            spent[name] = spent.get(name, 0.0) + x
    return rollout, judgement, spent


def _renamed(prompts: PromptBatch, like: PromptBatch) -> PromptBatch:
    names, group = prompts.group.unique(return_inverse=True)
    wanted = like.group.unique()
    if len(names) != len(wanted):
        raise ValueError(f"{len(names)} groups were sampled for a step of {len(wanted)}")
    return replace(prompts, group=wanted[group], row=like.row)


def _joined_fields(found: Sequence[T], **settled: object) -> T:
    """The first of ``found`` with every tensor that is not ``settled`` stacked over all of them."""
    changed = dict(settled)
    for f in fields(found[0]):
        mine = [getattr(each, f.name) for each in found]
        if f.name in settled or all(x is None for x in mine):
            continue
        if any(x is None for x in mine):
            raise ValueError(f"{f.name} is there for some pieces of a batch and missing for others")
        changed[f.name] = _stacked(mine, fill=_UNUSED.get(f.name, 0))
    return replace(found[0], **changed)  # type: ignore[arg-type]


def _stacked(parts: Sequence[Tensor], *, left: bool = False, fill: int = 0) -> Tensor:
    wide = [max(sizes) for sizes in zip(*(x.shape[1:] for x in parts), strict=True)]
    return torch.cat([widened(x, wide, left=left, fill=fill) for x in parts])


def _sums(judgements: Sequence[Judgement]) -> Mapping[str, tuple[float, float]]:
    """Sums and counts of what was measured of the pieces."""
    found = Metrics()
    for judgement in judgements:
        found = found.merge(Metrics(judgement.said))
    return found.totals


def _rows(judgements: Sequence[Judgement]) -> dict[str, list[object]]:
    """What was said of each row, None where a piece had none of it."""
    names = dict.fromkeys(name for j in judgements for name in j.extras)
    return {
        n: [x for j in judgements for x in j.extras.get(n, [None] * len(j.scores))] for n in names
    }


def _part(judgement: Judgement, name: str) -> Tensor:
    """Scores of one source; NaN where a piece had none of it."""
    found = judgement.parts.get(name)
    return torch.full_like(judgement.scores, torch.nan) if found is None else found
