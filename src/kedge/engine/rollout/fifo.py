"""Sampling and weight loading on one first-in-first-out worker.

The driver decides the order of both, so the schedule -- and with it every number -- is the same on
a slow and a fast machine.  At lag 0 the worker is the driver itself.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from kedge.engine.rollout.collector import PendingSample, RolloutCollector, Sample
from kedge.engine.rollout.threads import Inline, Worker, working
from kedge.engine.rollout.weight_sync import WeightUpdate, verify_sync
from kedge.errors import CheckpointError
from kedge.protocols import RolloutEngine
from kedge.types import Receipt, Rollout


class _Sync(NamedTuple):
    receipt: Future[Receipt | None]
    sent: WeightUpdate


@dataclass(slots=True)
class _Batch:
    """The samples of a step, sampled ahead: scored, on their way, or neither."""

    rollout: Rollout | None = None  # as soon as there is one
    sample: Future[Sample] | None = None  # None: its scores are still to be asked for

    def keep(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def known(self) -> PendingSample:
        """What there is, waited for."""
        if self.sample is not None:
            return self.sample.result()
        assert self.rollout is not None
        return self.rollout


class FifoScheduler:
    """Whole batches, each exactly ``min(step, max_lag)`` updates old."""

    _collector: RolloutCollector
    _rollout_engine: RolloutEngine

    def __init__(self, max_lag: int) -> None:
        self._max_lag = max_lag
        self._waiting: deque[_Batch] = deque()  # not trained on, by step
        self._syncs: deque[_Sync] = deque()
        self._held, self._moves = "", 0
        self._worker: Inline | Worker = Inline()
        self._until = 0

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """How samples are drawn from now on, and what draws them."""
        self._collector, self._rollout_engine = collector, rollouts

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Sample while inside; what was sampled ahead stays afterwards."""
        self._until = until
        self._syncs.clear()
        worker = self._worker = Worker("rollout") if self._max_lag > 0 else Inline()
        with working(worker.threads, close=worker.close, drop=self._waiting.clear):
            yield

    def send(self, weight_update: WeightUpdate) -> None:
        """Load these weights after everything already asked of the sampler."""
        load = self._rollout_engine.load_weights
        receipt = self._worker.submit(load, weight_update.weights, weight_update.version)
        self._syncs.append(_Sync(receipt, weight_update))

    def next_sample(self, step: int) -> Sample:
        """The samples of ``step``; those of the next ``max_lag`` steps are asked for, too.

        They stay in flight until they are spent.
        """
        for batch in self._waiting:
            if batch.sample is None and batch.rollout is not None:
                batch.sample = self._worker.submit(self._collector.score, batch.rollout)
        while (sent := step + len(self._waiting)) < self._until and sent - step <= self._max_lag:
            self._waiting.append(self._drawn(sent))
        first = self._waiting[0].sample
        assert first is not None  # asked for above
        sample = first.result()
        self._verify_syncs(wait=False)
        return sample

    def _drawn(self, step: int) -> _Batch:
        batch, draw = _Batch(), self._collector.draw
        batch.sample = self._worker.submit(draw, step, self._rollout_engine, on_rollout=batch.keep)
        return batch

    def mark_consumed(self) -> None:
        """What was taken last was trained on."""
        self._waiting.popleft()

    def recover_after_error(self, step: int) -> None:
        """After a failure at ``step``: keep the responses sampled ahead, to be scored anew.

        They end before the first that could not be sampled, for the order is what makes a run
        repeatable; none are kept where scores decide what is sampled further.
        """
        wait([batch.sample for batch in self._waiting if batch.sample is not None])
        if self._collector.more:
            self._waiting.clear()
        there = takewhile(lambda batch: batch.rollout is not None, self._waiting)
        self._waiting = deque(_Batch(batch.rollout) for batch in there)

    def wait_for_syncs(self) -> None:
        """Wait for the receipts that are still to come."""
        self._verify_syncs(wait=True)

    def _verify_syncs(self, *, wait: bool) -> None:
        while self._syncs and (wait or self._syncs[0].receipt.done()):
            receipt, sent = self._syncs.popleft()
            moved, self._moves = sent.moves > self._moves, sent.moves
            self._held = verify_sync(receipt.result(), sent, held=self._held, moved=moved)

    @property
    def in_flight(self) -> list[PendingSample]:
        """Samples not trained on yet; waits for those still being sampled."""
        return [batch.known() for batch in self._waiting]

    def restore(self, samples: list[PendingSample], step: int) -> None:
        """Take samples as already drawn for the next updates, as after a resume.

        Those that are older than this run's lag allows are left out, with a warning.

        Raises:
            CheckpointError: they are not batches of the size of this run.
        """
        rollouts = [each if isinstance(each, Rollout) else each[0] for each in samples]
        for n, rollout in enumerate(rollouts):
            size = len(self._collector.source.batch(step + n))
            if len(rollout) != size:
                raise CheckpointError(
                    f"what was sampled ahead comes in batches of {len(rollout)} responses, and this"
                    f" run's have {size}: resume with the batch size and rollout_schedule of before"
                )
        oldest = [step + n - self._max_lag for n in range(len(rollouts))]
        known = [r.version[r.version >= 0].tolist() for r in rollouts]
        if any(v < most for vs, most in zip(known, oldest, strict=True) for v in vs):
            warnings.warn(
                f"what was sampled ahead is too old for max_lag={self._max_lag}; it is sampled"
                " anew",
                stacklevel=2,
            )
            samples = []
        self._waiting = deque(map(_done, samples))


def _done(found: PendingSample) -> _Batch:
    if isinstance(found, Rollout):
        return _Batch(found)
    sample: Future[Sample] = Future()
    sample.set_result(found)
    return _Batch(found[0], sample)
