"""Samples of several pieces as the one sample of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kedge.engine.rollout.collector import Sample
from kedge.types import PromptBatch, RewardOutput, Rollout, separated


def split_groups(batch: PromptBatch, count: int) -> list[Tensor]:
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
    prompts = separated([rollout.prompts for rollout, *_ in samples])
    rollout = Rollout.cat(
        [replace(s[0], prompts=p) for s, p in zip(samples, prompts, strict=True)],
        names=[f"the rollout engine of partial batch {i}" for i in range(len(samples))],
    )
    rollout = replace(rollout, prompts=_renamed(rollout.prompts, like))
    reward_output = RewardOutput.cat([reward_output for _, reward_output, _ in samples]).widened_to(
        rollout
    )
    spent: dict[str, float] = {}
    for _, _, took in samples:
        for name, x in took.items():
            spent[name] = spent.get(name, 0.0) + x
    return rollout, reward_output, spent


def _renamed(prompts: PromptBatch, like: PromptBatch) -> PromptBatch:
    names, group = prompts.group.unique(return_inverse=True)
    wanted = like.group.unique()
    if len(names) != len(wanted):
        raise ValueError(f"{len(names)} groups were sampled for a step of {len(wanted)}")
    return replace(prompts, group=wanted[group], row=like.row)
