"""Trains on responses as soon as they are done, without waiting for the longest ones.

Engines with slots hold many groups (the responses to one prompt) and get another one when slots
become free; other engines sample partial batches of several groups.  An iteration takes the groups
that were done first, so what is trained on depends on timing.  The staleness bound does not: see
``kedge.rollout.scheduler.dispatch``.

New weights reach an engine with slots when the groups that it holds are done, or at once with
in-flight weight updates: then each token has the version that sampled it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from kedge.errors import CheckpointError, ConfigError, LostRequestsError
from kedge.protocols import RolloutEngine
from kedge.rollout.scheduler.collector import LockedRewardSource, PendingSample
from kedge.rollout.scheduler.dispatch import Dispatcher
from kedge.rollout.scheduler.dynamic_sampling import REPLACED, uniform_rows
from kedge.rollout.scheduler.joining import (
    GroupPrompts,
    SampleStore,
    join_groups,
    restored_groups,
    with_groups,
)
from kedge.rollout.scheduler.scheduler import RolloutScheduler
from kedge.rollout.scheduler.weight_sync import WeightUpdate
from kedge.rollout.scheduler.worker import EngineWorker, Occupancy, SampledNumbers, num_workers
from kedge.types import Rollout, Sample, add_times

logger = logging.getLogger(__name__)


class AsCompletedScheduler(RolloutScheduler):
    """Groups in the order in which they are done, none older than ``max_lag``.

    The dispatcher numbers groups.  With dynamic sampling, a group whose scores are all equal is not
    done: it starts again with another prompt, at most as many times as there are rounds.

    Args:
        partial_batches: per iteration, for engines without slots; must divide its prompts.
        max_lag: iterations that sampling may be ahead of training, at least 1.
        in_flight: engines get new weights while they sample.
    """

    def __init__(self, partial_batches: int, max_lag: int, *, in_flight: bool = False) -> None:
        if max_lag < 1:
            raise ConfigError(
                f'rollout_schedule="as_completed" needs max_lag of at least 1, got {max_lag}'
            )
        super().__init__(Dispatcher(per_step=0, max_lag=max_lag, in_flight=in_flight))
        self._updates = deque(maxlen=1)  # the newest alone
        self._partial_batches = partial_batches
        self._prompts: GroupPrompts
        self._store = SampleStore()  # scored, not trained on
        self._times: dict[str, float] = {}  # of groups that were all replaced
        self._occupancy = Occupancy()
        # "now": engines pause between tokens; "empty": when they hold no groups
        self._pause: Literal["", "now", "empty"] = ""

    def _connect(self, rollouts: RolloutEngine) -> list[EngineWorker]:
        self.collector = replace(self.collector, reward=LockedRewardSource(self.collector.reward))
        self._occupancy = Occupancy()
        workers = [
            EngineWorker(engine=e, slots=getattr(e, "slots", 0), all=self._occupancy)
            for e in num_workers(rollouts)
        ]
        ready = all(w.slots and getattr(w.engine, "updates_in_flight", False) for w in workers)
        if self._dispatcher.in_flight and not ready:
            raise ConfigError(
                "in_flight_weight_updates=True needs a rollout engine that gets weights while it"
                f" holds single requests, but {type(rollouts).__name__} samples partial batches as"
                " a whole; leave it out"
            )
        return workers

    def _begin(self, step: int) -> None:
        self._read_prompts(step)
        self._pause = ""
        self._sampled.clear()
        dispatcher = self._dispatcher
        dispatcher.give_back(list(dispatcher.running))
        dispatcher.next = max(dispatcher.next, step * dispatcher.per_step)
        dispatcher.step, dispatcher.end = step, self._until * dispatcher.per_step

    def _read_prompts(self, step: int) -> None:
        rounds = self.collector.algorithm.resample
        self._prompts = GroupPrompts(self.collector.source, step, rounds=rounds)
        self._dispatcher.per_step = self._prompts.per_step

    def _request(self, step: int) -> None:
        self._pause = ""

    def _next_work(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        if not self._updates or self._pause == "now" or self._closing or self._failure:
            return None
        newest = self._updates[-1]
        full = self._room(newest.step) <= 0
        changed = worker.update is None or worker.update.version != newest.version
        load = changed and (self._dispatcher.in_flight or not worker.held)
        update = newest if load else None
        numbers = [] if self._pause or full else self._start(worker, update, newest)
        if numbers or (worker.held and (update is not None or not full)):
            return update, numbers
        return None

    def _start(
        self, worker: EngineWorker, new: WeightUpdate | None, newest: WeightUpdate
    ) -> list[int]:
        """Groups for the free slots of the engine, which has its weights or is to load new ones."""
        dispatcher, update = self._dispatcher, new or worker.update
        assert update is not None
        if not dispatcher.may_start(update.step, newest.step):
            return []  # it completes what it holds, then loads the newest weights
        limit = dispatcher.per_step // self._partial_batches
        needs_greedy = self.collector.algorithm.needs_greedy
        rows = self._prompts.rows_per_group + needs_greedy
        if worker.slots:
            free = max((worker.slots - worker.unfinished) // rows, not worker.held)
            ahead = dispatcher.startable(update.step) + len(dispatcher.running)
            limit = min(free, -(-ahead // len(self._workers)) - len(worker.held))
            # a short greedy response may be most of a group
            all_held = self._occupancy
            held = all_held.groups if needs_greedy else all_held.responses / rows
            limit = int(min(limit, self._room(update.step) - held))
        numbers = dispatcher.start(update.step, max(limit, 0))
        worker.hold(numbers, update.version, rows)
        return numbers

    def _room(self, version: int) -> float:
        """How many more groups may complete with weights of ``version``, in flight."""
        if not self._dispatcher.in_flight:
            return math.inf
        unscored = len(self._dispatcher.running) - self._occupancy.groups
        return self._dispatcher.room(version, unscored)

    def _sample(self, worker: EngineWorker, numbers: list[int]) -> None:
        assert worker.update is not None
        if worker.slots:
            with self._lock:
                full = not numbers and self._room(worker.update.step) <= 0
            if not full:
                self._advance(worker, numbers)
            return
        for step, groups, rows in self._prompts.rows(numbers):
            self._sample_rows(worker, step, groups, rows)
        with self._lock:
            worker.release_all()

    def _number(self, worker: EngineWorker, rollout: Rollout, numbers: list[int]) -> Rollout:
        rollout = replace(rollout, prompts=with_groups(rollout.prompts, numbers))
        worker.check(rollout)
        return rollout

    def _advance(self, worker: EngineWorker, numbers: list[int]) -> None:
        sampled: SampledNumbers | None = None
        try:
            sampled = worker.advance(numbers, self.collector, self._prompts)
        except LostRequestsError as error:
            logger.warning("%s; they are sampled again", error)
            with self._lock:
                self._give_back(worker)
        with self._lock:
            worker.count_unfinished()
            if sampled is not None:
                worker.release(sampled.numbers)
                self._sampled.append(sampled)
                self._changed.notify_all()

    def _add(self, sampled: Sequence[SampledNumbers], sample: Sample) -> None:
        versions = {number: x.step for x in sampled for number in x.numbers}
        times, self._times = add_times([self._times, sample.times]), {}
        if replaced := self._replaced(sample):
            self._prompts.replace(replaced)
            self._dispatcher.give_back(replaced)
            self._work.notify_all()
            versions = {n: version for n, version in versions.items() if n not in replaced}
            if not versions:
                self._times = times
                return
            kept = ~torch.isin(sample.rollout.prompts.group, torch.tensor(replaced))
            sample = sample.rows(kept.nonzero()[:, 0])
        self._store.add(replace(sample, times=times))
        for number, version in versions.items():
            self._dispatcher.complete([number], version)

    def _replaced(self, sample: Sample) -> list[int]:
        """Groups of equal scores that have rounds left; partial batches were drawn with theirs."""
        rounds = self.collector.algorithm.resample
        if not rounds or not self._workers[0].slots:
            return []
        uniform = sample.rollout.prompts.group[uniform_rows(sample)].unique().tolist()
        return [number for number in uniform if self._prompts.turn(number) < rounds]

    def _take(self, step: int) -> list[Sample] | None:
        if (numbers := self._dispatcher.take(step)) is None:
            return None
        first, *others = self._store.take(numbers)
        if self.collector.algorithm.resample:
            replaced = float(self._prompts.pop_turns(numbers))
            first = replace(first, times=add_times([first.times, {REPLACED: replaced}]))
        return [first, *others]

    def _join(self, samples: list[Sample], step: int) -> Sample:
        sample = join_groups(samples, self._prompts.batch(step))
        self._prompts.forget_before(step)
        times = {
            name: x / len(self._workers) if name.startswith("time/") else x
            for name, x in sample.times.items()
        }
        return replace(sample, times=times)

    def wait_for_syncs(self) -> None:
        """Does nothing: engines confirm weights before they sample with them."""

    def _wait_until_idle(self) -> None:
        self._wait_for_pause("now" if self._dispatcher.in_flight else "empty")

    def _wait_for_pause(self, pause: Literal["now", "empty"]) -> None:
        """Wait until no thread is at work and, with "empty", no engine holds groups."""
        self._pause = pause
        self._work.notify_all()
        self._wait_while(
            lambda: (
                self._scoring
                or self._sampled
                or any(w.busy or (pause == "empty" and w.held) for w in self._workers)
            )
        )

    @property
    def in_flight(self) -> list[PendingSample]:
        """Samples not trained on yet, and the prompts of groups that are being sampled.

        Pauses sampling until the next ``next_sample``.
        """
        with self._lock:
            self._wait_for_pause("now")
            started = [*self._dispatcher.running, *self._dispatcher.returned]
            prompts = [batch for *_, batch in self._prompts.prompts(started)]
            return [*self._store.read(), *(replace(batch, columns={}) for batch in prompts)]

    def _clear(self, step: int) -> None:
        self._store.clear()
        self._sampled.clear()
        self._dispatcher.clear(step)
        for worker in self._workers:
            worker.release_all()

    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``.

        Raises:
            CheckpointError: their groups are not those of this run, or they are too old.
        """
        self._read_prompts(step)
        self._clear(step)
        restored = restored_groups(samples, size=self._prompts.rows_per_group, step=step)
        for sample in restored.samples:
            self._store.add(sample)
        if not self._dispatcher.restore(step, restored.versions, restored.lost):
            raise CheckpointError(
                f"samples in the checkpoint are too old for max_lag={self._dispatcher.max_lag}:"
                " resume with the same max_lag"
            )
