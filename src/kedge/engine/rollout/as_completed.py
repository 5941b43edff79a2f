"""Trains on responses as soon as they are done, without waiting for the longest ones.

Engines with slots hold many groups (the responses to one prompt) and get another one when slots
become free; other engines sample partial batches of several groups.  An iteration takes the groups
that were done first, so what is trained on depends on timing.  The staleness bound does not: see
``kedge.engine.rollout.dispatch``.

New weights reach an engine with slots when the groups that it holds are done, or at once with
in-flight weight updates: then each token has the version that sampled it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from kedge.engine.rollout.collector import (
    LockedRewardSource,
    PendingSample,
    RolloutCollector,
    Sample,
)
from kedge.engine.rollout.dispatch import Dispatcher
from kedge.engine.rollout.joining import (
    GroupPrompts,
    SampleStore,
    joined,
    restored_groups,
    total_times,
)
from kedge.engine.rollout.threads import working
from kedge.engine.rollout.weight_sync import WeightUpdate
from kedge.engine.rollout.worker import EngineWorker, Occupancy, SampledGroups, num_workers
from kedge.errors import CheckpointError, ConfigError, LostRequestsError
from kedge.protocols import RolloutEngine
from kedge.types import Rollout, group_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Groups that are to be scored."""

    rollout: Rollout
    numbers: list[int]  # of the groups
    times: dict[str, float]
    step: int  # iterations that the engine's weights have seen


class AsCompletedScheduler:
    """Groups in the order in which they are done, none older than ``max_lag``.

    Args:
        partial_batches: per iteration, for engines without slots; must divide its prompts.
        max_lag: iterations that sampling may be ahead of training, at least 1.
        in_flight: engines get new weights while they sample.
    """

    collector: RolloutCollector
    _prompts: GroupPrompts

    def __init__(self, partial_batches: int, max_lag: int, *, in_flight: bool = False) -> None:
        if max_lag < 1:
            raise ConfigError(
                f'rollout_schedule="as_completed" needs max_lag of at least 1, got {max_lag}'
            )
        self._partial_batches, self._in_flight = partial_batches, in_flight
        self._dispatcher = Dispatcher(per_step=0, max_lag=max_lag, in_flight=in_flight)
        self._store = SampleStore()
        self._sampled: list[_Sampled] = []
        self._scoring = False
        self._workers: list[EngineWorker] = []
        self._occupancy = Occupancy()
        self._newest: WeightUpdate | None = None
        self._pause = ""  # "now": between tokens; "empty": when engines hold no groups
        self._closing = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # workers wait for groups and weights
        self._changed = threading.Condition(self._lock)  # others wait for workers

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine, which samples with one thread per worker.

        Raises:
            ConfigError: weights cannot be updated in flight.
        """
        self.collector = replace(collector, reward=LockedRewardSource(collector.reward))
        engines = num_workers(rollouts)
        # If scores decide what is sampled next, partial batches are sampled and scored whole.
        slots = [0 if collector.more else getattr(engine, "slots", 0) for engine in engines]
        if [worker.engine for worker in self._workers] != list(engines):
            self._occupancy = Occupancy()
            self._workers = [
                EngineWorker(engine=e, slots=n, all=self._occupancy)
                for e, n in zip(engines, slots, strict=True)
            ]
        ready = [
            n and getattr(e, "updates_in_flight", False)
            for e, n in zip(engines, slots, strict=True)
        ]
        if self._in_flight and not all(ready):
            what = f"{type(rollouts).__name__} samples"
            if collector.more:
                what = f"{collector.algorithm.name} (dynamic sampling or greedy baselines) samples"
            raise ConfigError(
                "in_flight_weight_updates=True needs a rollout engine that gets weights while it"
                f" holds single requests, but {what} partial batches as a whole; leave it out"
            )

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Context in which to sample; groups that are done are kept at the end."""
        self._read_prompts(step)
        dispatcher = self._dispatcher
        dispatcher.next = max(dispatcher.next, step * dispatcher.per_step)
        dispatcher.step, dispatcher.end = step, until * dispatcher.per_step
        dispatcher.give_back(list(dispatcher.running))
        self._newest, self._failure, self._closing, self._pause = None, None, False, ""
        targets: list[Callable[[], None]] = [self._score_groups]
        for worker in self._workers:
            worker.reset()
            targets.append(partial(self._sample_on, worker))
        threads = [
            threading.Thread(target=self._run, args=(target,), name=f"rollout {n}", daemon=True)
            for n, target in enumerate(targets)
        ]
        for thread in threads:
            thread.start()
        with working(threads, close=self._close, drop=self._drop):
            yield

    def _read_prompts(self, step: int) -> None:
        self._prompts = GroupPrompts(self.collector.source, step)
        self._dispatcher.per_step = self._prompts.per_step

    def _close(self) -> None:
        with self._lock:
            self._closing = True
            self._notify()

    def _notify(self) -> None:
        self._work.notify_all()
        self._changed.notify_all()

    def _drop(self, step: int = 0) -> None:
        """Drop all groups; ``step`` starts with its first prompts."""
        self._store.clear()
        self._sampled.clear()
        self._dispatcher.clear(step)
        self._failure = None
        for worker in self._workers:
            worker.release_all()

    def send(self, weight_update: WeightUpdate) -> None:
        """Start every group from now on with these weights."""
        with self._lock:
            self._newest = weight_update
            self._work.notify_all()

    def next_sample(self, step: int) -> Sample:
        """The sample of iteration ``step``; blocks until it is ready."""
        with self._lock:
            self._pause = ""
            self._work.notify_all()
            while (numbers := self._take(step)) is None:
                self._changed.wait()
            samples = self._store.take(numbers)
            self._work.notify_all()
        rollout, reward_output, times = joined(samples, self._prompts.batch(step))
        self._prompts.forget_before(step)
        for name in times:
            if name.startswith("time/"):
                times[name] /= len(self._workers)
        return rollout, reward_output, times

    def _take(self, step: int) -> list[int] | None:
        if self._failure is not None:
            raise self._failure
        dispatcher, newest = self._dispatcher, self._newest
        numbers = dispatcher.take(step)
        if numbers is not None or dispatcher.running or newest is None:
            return numbers
        if not dispatcher.startable(newest.step):
            raise RuntimeError(
                f"step {step} waits for groups that are not being sampled: {len(dispatcher.done)}"
                f" are done and {dispatcher.next} started, with {dispatcher.per_step} per step and"
                f" max_lag={dispatcher.max_lag}"
            )
        return None

    def mark_consumed(self) -> None:
        """Does nothing: a sample leaves the scheduler when it is taken."""

    def recover_after_error(self, step: int) -> None:
        """After a failure in ``step``: drop everything and restart with the prompts of ``step``."""
        self._close()
        with self._lock:
            while self._scoring or any(worker.busy for worker in self._workers):
                self._changed.wait()
            self._drop(step)

    def wait_for_syncs(self) -> None:
        """Does nothing: workers verify each sync before they sample."""

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines; they resume at the next ``next_sample``."""
        with self._lock:
            self._wait_for_pause("now" if self._in_flight else "empty")

    def _wait_for_pause(self, pause: str) -> None:
        self._pause = pause
        self._work.notify_all()
        while self._failure is None and self._sampling(held=pause == "empty"):
            self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _sampling(self, *, held: bool) -> bool:
        """Whether threads are at work, or engines hold groups."""
        workers = any(w.busy or (held and w.held) for w in self._workers)
        return bool(workers or self._scoring or self._sampled)

    @property
    def in_flight(self) -> list[PendingSample]:
        """Samples not trained on yet, and the prompts of groups that are being sampled.

        Pauses sampling until the next ``next_sample``.
        """
        with self._lock:
            self._wait_for_pause("now")
            started = [*self._dispatcher.running, *self._dispatcher.returned]
            prompts = [batch for _, batch in self._prompts.prompts(started)]
            return [*self._store.read(), *(replace(batch, columns={}) for batch in prompts)]

    def restore(self, samples: list[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``.

        Raises:
            CheckpointError: their groups are not those of this run, or they are too old.
        """
        self._read_prompts(step)
        self._drop(step)
        restored = restored_groups(samples, size=self._prompts.rows_per_group, step=step)
        for sample in restored.samples:
            self._store.add(sample)
        if not self._dispatcher.restore(step, restored.versions, restored.lost):
            raise CheckpointError(
                f"samples in the checkpoint are too old for max_lag={self._dispatcher.max_lag}:"
                " resume with the same max_lag"
            )

    def _run(self, target: Callable[[], None]) -> None:
        try:
            with suppress(KeyboardInterrupt):  # the driver was interrupted first
                target()
        except BaseException as error:  # re-raised in the driver
            with self._lock:
                self._failure = self._failure or error
                self._notify()

    def _sample_on(self, worker: EngineWorker) -> None:
        try:
            while (work := self._begin(worker)) is not None:
                self._sample(worker, *work)
        finally:
            with self._lock:
                worker.busy = False
                self._give_back(worker)
                self._changed.notify_all()

    def _advance(self, worker: EngineWorker, numbers: list[int]) -> SampledGroups | None:
        try:
            return worker.advance(numbers, self.collector, self._prompts)
        except LostRequestsError as error:
            logger.warning("%s; they are sampled again", error)
            with self._lock:
                self._give_back(worker)
            return None

    def _give_back(self, worker: EngineWorker) -> None:
        self._dispatcher.give_back(n for n in worker.held if n in self._dispatcher.running)
        worker.release_all()
        self._work.notify_all()

    def _begin(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        """New weights and groups for an engine, once it has something to do; None at the end."""
        with self._lock:
            worker.busy = False
            if self._pause:
                self._changed.notify_all()
            while not (self._closing or self._failure):
                newest = self._newest
                if newest is not None and self._pause != "now":
                    full = self._room(newest.step) <= 0
                    update = self._new_weights(worker, newest)
                    numbers = [] if self._pause or full else self._start(worker, update)
                    in_flight_update = update is not None and bool(worker.held)
                    if numbers or in_flight_update or (worker.held and not full):
                        worker.busy = True
                        return update, numbers
                self._work.wait()
        return None

    def _new_weights(self, worker: EngineWorker, newest: WeightUpdate) -> WeightUpdate | None:
        """The newest weights, if the engine must load them now."""
        if worker.update is None:
            return newest
        changed = worker.update.version != newest.version
        return newest if changed and (self._in_flight or not worker.held) else None

    def _start(self, worker: EngineWorker, new: WeightUpdate | None) -> list[int]:
        """Groups for the free slots of an engine, which has its weights or is to load new ones."""
        dispatcher, update = self._dispatcher, new or worker.update
        assert update is not None
        assert self._newest is not None
        if not dispatcher.may_start(update.step, self._newest.step):
            return []  # it completes what it holds, then loads the newest weights
        limit = dispatcher.per_step // self._partial_batches
        rows = self._prompts.rows_per_group
        if worker.slots:
            free = max((worker.slots - worker.unfinished) // rows, not worker.held)
            ahead = dispatcher.startable(update.step) + len(dispatcher.running)
            limit = min(free, -(-ahead // len(self._workers)) - len(worker.held))
            limit = int(min(limit, self._room(update.step) - self._occupancy.responses / rows))
        numbers = dispatcher.start(update.step, max(limit, 0))
        worker.hold(numbers, update.version, rows)
        return numbers

    def _room(self, version: int) -> float:
        """How many more groups may complete with weights of ``version``, in flight."""
        if not self._in_flight:
            return math.inf
        unscored = len(self._dispatcher.running) - self._occupancy.groups
        return self._dispatcher.room(version, unscored)

    def _sample(
        self, worker: EngineWorker, update: WeightUpdate | None, numbers: list[int]
    ) -> None:
        if update is not None:
            worker.load(update)
            with self._lock:
                self._dispatcher.reload(worker.held, update.step)
                self._changed.notify_all()
                if not numbers and self._room(update.step) <= 0:
                    return
        assert worker.update is not None
        step = worker.update.step
        if not worker.slots:
            for sample in worker.draw(numbers, self.collector, self._prompts):
                groups = group_rows(sample[0].prompts)[0]
                self._add_done(sample, dict.fromkeys(groups, step))
            with self._lock:
                worker.release_all()
            return
        sampled = self._advance(worker, numbers)
        with self._lock:
            worker.count_unfinished()
            if sampled is not None and not self._closing:
                rollout, groups, times = sampled
                worker.release(groups)
                self._sampled.append(_Sampled(rollout, groups, times, step))
                self._changed.notify_all()

    def _score_groups(self) -> None:
        """Score what was sampled, all that is waiting at once."""
        try:
            while sampled := self._next_sampled():
                whole = Rollout.cat([x.rollout for x in sampled])
                rollout, reward_output, times = self.collector.score(whole)
                times |= total_times(x.times for x in sampled)
                steps = {n: x.step for x in sampled for n in x.numbers}
                self._add_done((rollout, reward_output, times), steps)
        finally:
            self._scoring = False  # the failure that ends this notifies who waits

    def _next_sampled(self) -> list[_Sampled]:
        """Groups to score; none at the end."""
        with self._lock:
            self._scoring = False
            self._changed.notify_all()
            while not (self._sampled or self._closing or self._failure):
                self._changed.wait()
            sampled = [] if self._failure else self._sampled
            self._sampled, self._scoring = [], bool(sampled)
            return sampled

    def _add_done(self, sample: Sample, steps: Mapping[int, int]) -> None:
        """Add scored groups and the versions of their engines."""
        with self._lock:
            self._store.add(sample)
            for number, step in steps.items():
                self._dispatcher.complete([number], step)
            self._changed.notify_all()
