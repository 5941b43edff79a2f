"""Joins partial batches into the sample of one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kedge.engine.rollout.collector import Sample
from kedge.types import PromptBatch, RewardOutput, Rollout, separated


def split_groups(batch: PromptBatch, count: int) -> list[Tensor]:
    """Split the rows of a batch into ``count`` partial batches of whole groups; each int64 [n].

    Raises:
        ValueError: ``count`` does not divide the number of groups.
    """
    ids, group = batch.group.unique(return_inverse=True)
    if len(ids) % count:
        raise ValueError(f"{len(ids)} prompts cannot be split into {count} equal partial batches")
    part = group // (len(ids) // count)
    return [(part == k).nonzero().squeeze(1) for k in range(count)]


def joined(samples: Sequence[Sample], like: PromptBatch) -> Sample:
    """Join samples into one, padded to the widest of them.

    Rows and groups are renumbered like those of ``like``, since partial batches of different
    steps may share group ids.  Seconds and counts add.

    Args:
        samples: each with whole groups.
        like: the prompts of the step.
    """
    prompts = separated([rollout.prompts for rollout, *_ in samples])
    rollout = Rollout.cat(
        [replace(s[0], prompts=p) for s, p in zip(samples, prompts, strict=True)],
        names=[f"the rollout engine of partial batch {i}" for i in range(len(samples))],
    )
    rollout = replace(rollout, prompts=_renumber(rollout.prompts, like))
    reward_output = RewardOutput.cat([reward_output for _, reward_output, _ in samples]).widened_to(
        rollout
    )
    times: dict[str, float] = {}
    for _, _, seconds in samples:
        for name, x in seconds.items():
            times[name] = times.get(name, 0.0) + x
    return rollout, reward_output, times


def _renumber(prompts: PromptBatch, like: PromptBatch) -> PromptBatch:
    sampled, group = prompts.group.unique(return_inverse=True)
    ids = like.group.unique()
    if len(sampled) != len(ids):
        raise ValueError(f"got {len(sampled)} groups for an iteration of {len(ids)}")
    return replace(prompts, group=ids[group], row=like.row)
