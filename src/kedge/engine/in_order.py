"""Sampling and weight loading on one first-in-first-out worker.

The driver decides the order of both, so the schedule -- and with it every number -- is the same on
a slow and a fast machine.  At lag 0 the worker is the driver itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

from kedge.engine.drawing import Ahead, Drawing, Sample
from kedge.engine.receipts import Shipment, confirmed
from kedge.engine.threads import Inline, Worker, working
from kedge.protocols import RolloutEngine
from kedge.types import Receipt, Rollout


class _Sync(NamedTuple):
    receipt: Future[Receipt | None]
    sent: Shipment


class InOrder:
    """Whole batches, each exactly ``min(step, max_lag)`` updates old."""

    _drawing: Drawing
    _rollouts: RolloutEngine

    def __init__(self, max_lag: int) -> None:
        self._max_lag = max_lag
        self._waiting: deque[Future[Sample] | Rollout] = deque()  # not trained on, by step
        self._syncs: deque[_Sync] = deque()
        self._held, self._moves = "", 0
        self._worker: Inline | Worker = Inline()
        self._until = 0

    def draw_with(self, drawing: Drawing, rollouts: RolloutEngine) -> None:
        """How samples are drawn from now on, and what draws them."""
        self._drawing, self._rollouts = drawing, rollouts

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Sample while inside; what was sampled ahead stays afterwards."""
        self._until = until
        self._syncs.clear()
        worker = self._worker = Worker("rollout") if self._max_lag > 0 else Inline()
        with working(worker.threads, close=worker.close, drop=self._waiting.clear):
            yield

    def send(self, shipment: Shipment) -> None:
        """Load these weights after everything already asked of the sampler."""
        load = self._rollouts.load_weights
        receipt = self._worker.submit(load, shipment.weights, shipment.version)
        self._syncs.append(_Sync(receipt, shipment))

    def take(self, step: int) -> Sample:
        """The samples of ``step``; those of the next ``max_lag`` steps are asked for, too."""
        for n, ahead in enumerate(self._waiting):
            if isinstance(ahead, Rollout):
                self._waiting[n] = self._worker.submit(self._drawing.score, step + n, ahead)
        while (sent := step + len(self._waiting)) < self._until and sent - step <= self._max_lag:
            self._waiting.append(self._worker.submit(self._drawing.draw, sent, self._rollouts))
        first = self._waiting[0]
        assert isinstance(first, Future)
        sample = first.result()
        self._settle(wait=False)
        return sample

    def spend(self) -> None:
        """What was taken last was trained on."""
        self._waiting.popleft()

    def salvage(self, step: int) -> None:
        """After a failure at ``step``: keep the responses sampled ahead, to be scored anew.

        They end before the first that could not be sampled, for the order is what makes a run
        repeatable; none are kept where scores decide what is sampled further.
        """
        kept: deque[Future[Sample] | Rollout] = deque()
        for n, ahead in enumerate(() if self._drawing.more else self._waiting):
            rollout = ahead if isinstance(ahead, Rollout) else self._sampled(ahead, step + n)
            if rollout is None:
                break
            kept.append(rollout)
        self._waiting = kept

    def _sampled(self, ahead: Future[Sample], step: int) -> Rollout | None:
        if ahead.exception() is None:
            return ahead.result()[0]
        return self._drawing.unscored.pop(step, None)

    def settle(self) -> None:
        """Wait for the receipts that are still to come."""
        self._settle(wait=True)

    def _settle(self, *, wait: bool) -> None:
        while self._syncs and (wait or self._syncs[0].receipt.done()):
            receipt, sent = self._syncs.popleft()
            moved, self._moves = sent.moves > self._moves, sent.moves
            self._held = confirmed(receipt.result(), sent, held=self._held, moved=moved)

    @property
    def in_flight(self) -> list[Ahead]:
        """What was sampled ahead and not yet trained on; waits for what is still being sampled."""
        return [a if isinstance(a, Rollout) else a.result() for a in self._waiting]

    def put_back(self, samples: list[Ahead], step: int) -> None:
        """Take samples as already drawn for the next updates, as after a resume."""
        self._waiting = deque(a if isinstance(a, Rollout) else _done(a) for a in samples)


def _done(sample: Sample) -> Future[Sample]:
    future: Future[Sample] = Future()
    future.set_result(sample)
    return future
