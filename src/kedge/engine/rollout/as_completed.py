"""Trains on responses as soon as they are done, without waiting for the longest ones.

Engines with slots hold many groups (the responses to one prompt) and get another one when slots
become free; other engines sample partial batches of several groups.  An iteration takes the groups
that were done first, so what is trained on depends on timing.  The staleness bound does not: see
``kedge.engine.rollout.dispatch``.

New weights reach an engine with slots when the groups that it holds are done, or at once with
in-flight weight updates: then each token has the version that sampled it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from kedge.engine.rollout.collector import (
    LockedRewardSource,
    PendingSample,
    RolloutCollector,
    Sample,
)
from kedge.engine.rollout.dispatch import Dispatcher
from kedge.engine.rollout.dynamic_sampling import REPLACED
from kedge.engine.rollout.joining import GroupPrompts, joined, restored_groups
from kedge.engine.rollout.sampling_thread import SamplingThread
from kedge.engine.rollout.scoring_thread import ScoringThread
from kedge.engine.rollout.state import SamplingState
from kedge.engine.rollout.threads import on_current_gpu, working
from kedge.engine.rollout.weight_sync import WeightUpdate
from kedge.engine.rollout.worker import EngineWorker, Occupancy, num_workers
from kedge.errors import CheckpointError, ConfigError
from kedge.protocols import RolloutEngine


class AsCompletedScheduler:
    """Groups in the order in which they are done, none older than ``max_lag``.

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
        dispatcher = Dispatcher(per_step=0, max_lag=max_lag, in_flight=in_flight)
        self._state = SamplingState(partial_batches=partial_batches, dispatcher=dispatcher)

    @property
    def collector(self) -> RolloutCollector:
        """Draws and scores samples."""
        return self._state.collector

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine, which samples with one thread per worker.

        Raises:
            ConfigError: weights cannot be updated in flight.
        """
        state = self._state
        state.collector = replace(collector, reward=LockedRewardSource(collector.reward))
        engines = num_workers(rollouts)
        slots = [getattr(engine, "slots", 0) for engine in engines]
        if [worker.engine for worker in state.workers] != list(engines):
            state.occupancy = Occupancy()
            state.workers = [
                EngineWorker(engine=e, slots=n, all=state.occupancy)
                for e, n in zip(engines, slots, strict=True)
            ]
        ready = [
            n and getattr(e, "updates_in_flight", False)
            for e, n in zip(engines, slots, strict=True)
        ]
        if state.in_flight and not all(ready):
            raise ConfigError(
                "in_flight_weight_updates=True needs a rollout engine that gets weights while it"
                f" holds single requests, but {type(rollouts).__name__} samples partial batches as"
                " a whole; leave it out"
            )

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Context in which to sample; groups that are done are kept at the end."""
        self._read_prompts(step)
        state, dispatcher = self._state, self._state.dispatcher
        dispatcher.next = max(dispatcher.next, step * dispatcher.per_step)
        dispatcher.step, dispatcher.end = step, until * dispatcher.per_step
        dispatcher.give_back(list(dispatcher.running))
        state.begin()
        targets: list[Callable[[], None]] = [ScoringThread(state).run]
        targets += [SamplingThread(state, worker).run for worker in state.workers]
        run = on_current_gpu(self._run)
        threads = [
            threading.Thread(target=run, args=(target,), name=f"rollout {n}", daemon=True)
            for n, target in enumerate(targets)
        ]
        for thread in threads:
            thread.start()
        with working(threads, close=state.close, drop=lambda: state.drop(0)):
            yield

    def _read_prompts(self, step: int) -> None:
        state = self._state
        rounds = state.collector.algorithm.resample
        state.prompts = GroupPrompts(state.collector.source, step, rounds=rounds)
        state.dispatcher.per_step = state.prompts.per_step

    def _run(self, target: Callable[[], None]) -> None:
        try:
            with suppress(KeyboardInterrupt):  # the driver was interrupted first
                target()
        except BaseException as error:  # re-raised in the driver
            self._state.fail(error)

    def send(self, weight_update: WeightUpdate) -> None:
        """Start every group from now on with these weights."""
        with self._state.lock:
            self._state.newest = weight_update
            self._state.work.notify_all()

    def next_sample(self, step: int) -> Sample:
        """The sample of iteration ``step``; blocks until it is ready."""
        state = self._state
        with state.lock:
            state.pause = ""
            state.work.notify_all()
            while (numbers := self._take(step)) is None:
                state.changed.wait()
            samples = state.store.take(numbers)
            replaced = state.prompts.pop_turns(numbers)
            state.work.notify_all()
        rollout, reward_output, times = joined(samples, state.prompts.batch(step))
        state.prompts.forget_before(step)
        for name in times:
            if name.startswith("time/"):
                times[name] /= len(state.workers)
        if state.collector.algorithm.resample:
            times[REPLACED] = times.get(REPLACED, 0.0) + replaced
        return rollout, reward_output, times

    def _take(self, step: int) -> list[int] | None:
        state, dispatcher = self._state, self._state.dispatcher
        if state.failure is not None:
            raise state.failure
        numbers = dispatcher.take(step)
        if numbers is not None or dispatcher.running or state.newest is None:
            return numbers
        if not dispatcher.startable(state.newest.step):
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
        state = self._state
        state.close()
        with state.lock:
            while state.scoring or any(worker.busy for worker in state.workers):
                state.changed.wait()
            state.drop(step)

    def wait_for_syncs(self) -> None:
        """Does nothing: workers verify each sync before they sample."""

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines; they resume at the next ``next_sample``."""
        with self._state.lock:
            self._state.wait_for_pause("now" if self._state.in_flight else "empty")

    @property
    def in_flight(self) -> list[PendingSample]:
        """Samples not trained on yet, and the prompts of groups that are being sampled.

        Pauses sampling until the next ``next_sample``.
        """
        state = self._state
        with state.lock:
            state.wait_for_pause("now")
            started = [*state.dispatcher.running, *state.dispatcher.returned]
            prompts = [batch for *_, batch in state.prompts.prompts(started)]
            return [*state.store.read(), *(replace(batch, columns={}) for batch in prompts)]

    def restore(self, samples: list[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``.

        Raises:
            CheckpointError: their groups are not those of this run, or they are too old.
        """
        self._read_prompts(step)
        state = self._state
        state.drop(step)
        restored = restored_groups(samples, size=state.prompts.rows_per_group, step=step)
        for sample in restored.samples:
            state.store.add(sample)
        if not state.dispatcher.restore(step, restored.versions, restored.lost):
            raise CheckpointError(
                f"samples in the checkpoint are too old for max_lag={state.dispatcher.max_lag}:"
                " resume with the same max_lag"
            )
