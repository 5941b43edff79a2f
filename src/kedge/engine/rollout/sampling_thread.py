"""The thread of one engine: it loads weights, starts groups, and hands over those that are done."""

from __future__ import annotations

import logging

from kedge.engine.rollout.state import SamplingState
from kedge.engine.rollout.weight_sync import WeightUpdate
from kedge.engine.rollout.worker import EngineWorker, SampledGroups
from kedge.errors import LostRequestsError
from kedge.types import group_rows

logger = logging.getLogger(__name__)


class SamplingThread:
    """Samples on one engine until the scheduler closes."""

    def __init__(self, state: SamplingState, worker: EngineWorker) -> None:
        self._state, self._worker = state, worker

    def run(self) -> None:
        """Sample groups; those that the engine holds at the end are given back."""
        try:
            while (work := self._begin()) is not None:
                self._sample(*work)
        finally:
            with self._state.lock:
                self._worker.busy = False
                self._state.give_back(self._worker)
                self._state.changed.notify_all()

    def _begin(self) -> tuple[WeightUpdate | None, list[int]] | None:
        """New weights and groups for the engine, once it has something to do; None at the end."""
        state, worker = self._state, self._worker
        with state.lock:
            worker.busy = False
            if state.pause:
                state.changed.notify_all()
            while not (state.closing or state.failure):
                newest = state.newest
                if newest is not None and state.pause != "now":
                    full = state.room(newest.step) <= 0
                    update = self._new_weights(newest)
                    numbers = [] if state.pause or full else self._start(update, newest)
                    in_flight_update = update is not None and bool(worker.held)
                    if numbers or in_flight_update or (worker.held and not full):
                        worker.busy = True
                        return update, numbers
                state.work.wait()
        return None

    def _new_weights(self, newest: WeightUpdate) -> WeightUpdate | None:
        """The newest weights, if the engine must load them now."""
        worker = self._worker
        if worker.update is None:
            return newest
        changed = worker.update.version != newest.version
        return newest if changed and (self._state.in_flight or not worker.held) else None

    def _start(self, new: WeightUpdate | None, newest: WeightUpdate) -> list[int]:
        """Groups for the free slots of the engine, which has its weights or is to load new ones."""
        state, worker = self._state, self._worker
        dispatcher, update = state.dispatcher, new or worker.update
        assert update is not None
        if not dispatcher.may_start(update.step, newest.step):
            return []  # it completes what it holds, then loads the newest weights
        limit = dispatcher.per_step // state.partial_batches
        rows = state.responses_per_group
        if worker.slots:
            free = max((worker.slots - worker.unfinished) // rows, not worker.held)
            ahead = dispatcher.startable(update.step) + len(dispatcher.running)
            limit = min(free, -(-ahead // len(state.workers)) - len(worker.held))
            held = state.occupancy.responses / rows
            if state.collector.algorithm.needs_greedy:
                held = float(state.occupancy.groups)  # a short greedy response may be most of one
            limit = int(min(limit, state.room(update.step) - held))
        numbers = dispatcher.start(update.step, max(limit, 0))
        worker.hold(numbers, update.version, rows)
        return numbers

    def _sample(self, update: WeightUpdate | None, numbers: list[int]) -> None:
        state, worker = self._state, self._worker
        if update is not None:
            worker.load(update)
            with state.lock:
                state.dispatcher.reload(worker.held, update.step)
                state.changed.notify_all()
                if not numbers and state.room(update.step) <= 0:
                    return
        if worker.slots:
            self._advance(numbers)
            return
        assert worker.update is not None
        for sample in worker.draw(numbers, state.collector, state.prompts):
            groups = group_rows(sample[0].prompts)[0]
            with state.lock:
                state.add_done(sample, dict.fromkeys(groups, worker.update.step))
        with state.lock:
            worker.release_all()

    def _advance(self, numbers: list[int]) -> None:
        state, worker = self._state, self._worker
        sampled: SampledGroups | None = None
        try:
            sampled = worker.advance(numbers, state.collector, state.prompts)
        except LostRequestsError as error:
            logger.warning("%s; they are sampled again", error)
            with state.lock:
                state.give_back(worker)
        with state.lock:
            worker.count_unfinished()
            if sampled is not None and not state.closing:
                worker.release(sampled.numbers)
                state.sampled.append(sampled)
                state.changed.notify_all()
