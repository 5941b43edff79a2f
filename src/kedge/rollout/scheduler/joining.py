"""Takes samples apart into groups, and joins groups to the sample of one iteration."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from kedge.records.errors import CheckpointError
from kedge.records.protocols import PromptSource
from kedge.records.types import (
    SYNC_GAP,
    PromptBatch,
    Rollout,
    Sample,
    group_rows,
    with_unique_groups,
)
from kedge.rollout.scheduler.collector import PendingSample, spare_step


class GroupPrompts:
    """The prompts of groups that are numbered over the run.

    Dynamic sampling replaces a group's prompt at most ``rounds`` times.
    """

    def __init__(self, source: PromptSource, step: int, *, rounds: int = 0) -> None:
        self._source, self._rounds = source, rounds
        self._turns: dict[int, int] = {}  # number of prompt replacements per group
        self._batches: dict[tuple[int, int], tuple[PromptBatch, Sequence[Tensor]]] = {}
        self._lock = Lock()  # engines read while the driver drops trained groups
        groups = self._batch(step)[1]
        self.per_step, self.rows_per_group = len(groups), len(groups[0])

    def batch(self, step: int) -> PromptBatch:
        """All prompts of an iteration."""
        return self._batch(step)[0]

    def turn(self, number: int) -> int:
        """Number of times that a group's prompt was replaced."""
        return self._turns.get(number, 0)

    def pop_turns(self, numbers: Iterable[int]) -> int:
        """Total prompt replacements in these groups; removes their counts."""
        return sum(self._turns.pop(number, 0) for number in numbers)

    def replace(self, numbers: Iterable[int]) -> None:
        """Give these groups the prompts of the next round of dynamic sampling."""
        for number in numbers:
            self._turns[number] = self.turn(number) + 1

    def prompts(self, numbers: Iterable[int]) -> Iterator[tuple[int, int, PromptBatch]]:
        """For each iteration and round among the groups, their numbers and prompts."""

        def key(number: int) -> tuple[int, int]:
            return self.turn(number), number // self.per_step

        ordered = sorted(numbers, key=lambda number: (*key(number), number))
        for (turn, step), together in itertools.groupby(ordered, key):
            groups, rows = list(together), self._batch(step)[1]
            index = torch.cat([rows[number % self.per_step] for number in groups])
            yield step, turn, with_groups(self._batch(step, turn)[0].rows(index), groups)

    def forget_before(self, step: int) -> None:
        """Drop the prompts of earlier iterations from memory."""
        with self._lock:
            for key in [key for key in self._batches if key[0] < step]:
                del self._batches[key]

    def _batch(self, step: int, turn: int = 0) -> tuple[PromptBatch, Sequence[Tensor]]:
        with self._lock:
            if (step, turn) not in self._batches:
                number = spare_step(step, turn - 1, self._rounds) if turn else step
                batch = self._source.batch(number)
                self._batches[step, turn] = batch, group_rows(batch)[1]
            return self._batches[step, turn]


def with_groups(prompts: PromptBatch, ids: Sequence[int]) -> PromptBatch:
    """Replace the group ids of prompts, in the order of the current ones."""
    _, group = prompts.group.unique(return_inverse=True)
    return replace(prompts, group=torch.tensor(ids, device=group.device)[group])


def renumber(sample: Sample, ids: Sequence[int]) -> Sample:
    """Replace the group ids of a sample, in the order of the current ones."""
    prompts = with_groups(sample.rollout.prompts, ids)
    return replace(sample, rollout=replace(sample.rollout, prompts=prompts))


class SampleStore:
    """Scored groups by group id; each is taken once, with its share of seconds and metrics."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Sample, Tensor]] = {}  # what it was added with, and its rows

    def add(self, sample: Sample) -> None:
        """Add the groups of a sample."""
        for number, rows in zip(*group_rows(sample.rollout.prompts), strict=True):
            self._places[number] = sample, rows

    def tokens(self, number: int) -> int:
        """Number of tokens of a group, prompts included."""
        sample, rows = self._places[number]
        rollout = sample.rollout
        return int(rollout.response_mask[rows].sum() + rollout.prompts.mask[rows].sum())

    def take(self, numbers: Iterable[int]) -> list[Sample]:
        """Remove these groups; groups that were added together stay together."""
        chosen: dict[int, tuple[Sample, list[Tensor]]] = {}
        for number in sorted(numbers):
            sample, rows = self._places.pop(number)
            chosen.setdefault(id(sample), (sample, []))[1].append(rows)
        return [_take_share(sample, torch.cat(index)) for sample, index in chosen.values()]

    def read(self) -> list[Sample]:
        """All groups, without removing them."""
        samples = self.take(list(self._places))
        for sample in samples:
            self.add(sample)
        return samples

    def clear(self) -> None:
        """Forget all groups."""
        self._places.clear()


def _take_share(sample: Sample, rows: Tensor) -> Sample:
    """These rows, with their share of seconds and of the metrics that rewards log."""
    part, share = sample.rows(rows), len(rows) / len(sample)
    times = {name: x if name == SYNC_GAP else x * share for name, x in sample.times.items()}
    totals = part.reward_output.metrics.items()
    metrics = {name: (total * share, count * share) for name, (total, count) in totals}
    return replace(part, reward_output=replace(part.reward_output, metrics=metrics), times=times)


def restore_groups(
    pending: Sequence[PendingSample], store: SampleStore, *, size: int, step: int
) -> tuple[dict[int, int], list[int]]:
    """Add the groups of a checkpoint that was written before ``step`` to a store.

    Returns the version of each group by id, and the ids of groups that were being sampled.  The
    ids of the first are negative: they need no prompts any more.
    """
    versions: dict[int, int] = {}
    lost: list[int] = []
    for x in pending:
        if isinstance(x, PromptBatch):
            lost.extend(group_rows(x)[0])
            continue
        if isinstance(x, Rollout):
            raise CheckpointError(
                f"the checkpoint has {len(pending)} unscored batches of another"
                " rollout_schedule: resume with the same rollout_schedule"
            )
        ids = []
        for rows in group_rows(x.rollout.prompts)[1]:
            if len(rows) != size:
                raise CheckpointError(
                    f"samples in the checkpoint must have {size} responses per prompt, got"
                    f" {len(rows)}: resume with the same rollout_schedule and num_generations"
                )
            ids.append(-1 - len(versions))
            known = x.rollout.policy_version[rows]
            known = known[known >= 0]
            versions[ids[-1]] = int(known.min()) if len(known) else step
        store.add(renumber(x, ids))
    return versions, lost


def join_groups(samples: Sequence[Sample], like: PromptBatch) -> Sample:
    """Join samples of whole groups into one, padded to the widest of them.

    Rows and groups are renumbered like those of ``like``, the prompts of the step, since samples of
    different steps may share group ids.
    """
    prompts = with_unique_groups([sample.rollout.prompts for sample in samples])
    parts = [
        replace(sample, rollout=replace(sample.rollout, prompts=apart))
        for sample, apart in zip(samples, prompts, strict=True)
    ]
    names = [f"the rollout engine of part {i}" for i in range(len(parts))]
    whole, ids = Sample.cat(parts, names=names), like.group.unique().tolist()
    sampled = len(whole.rollout.prompts.group.unique())
    if sampled != len(ids):
        raise ValueError(f"got {sampled} groups for an iteration of {len(ids)}")
    whole = renumber(whole, ids)
    prompts_of_step = replace(whole.rollout.prompts, row=like.row)
    return replace(whole, rollout=replace(whole.rollout, prompts=prompts_of_step))
