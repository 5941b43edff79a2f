"""Sampling and weight loading on one first-in-first-out worker thread, scoring on another.

The driver decides the order of each, so the schedule and all results are independent of timing.
At lag 0 everything runs in the driver's thread.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch

from kedge.engine.rollout.collector import PendingSample, RolloutCollector, Sample
from kedge.engine.rollout.threads import Inline, Worker, working
from kedge.engine.rollout.weight_sync import WeightUpdate, sync_gap, verify_sync
from kedge.errors import CheckpointError
from kedge.protocols import RolloutEngine
from kedge.types import PromptBatch, Receipt, Rollout


class _Sync(NamedTuple):
    receipt: Future[Receipt | None]
    sent: WeightUpdate


@dataclass(slots=True)
class _Batch:
    """The batch of one iteration: in progress, scored, or sampled but not yet scored."""

    rollout: Rollout | None = None  # set once sampled
    sample: Future[Sample] | None = None  # None: still to be scored

    def keep(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def result(self) -> PendingSample:
        """The sample, or the rollout if it is not being scored; blocks."""
        if self.sample is not None:
            return self.sample.result()
        assert self.rollout is not None
        return self.rollout


class FifoScheduler:
    """Whole batches, each exactly ``min(step, max_lag)`` iterations old."""

    _collector: RolloutCollector
    _rollout_engine: RolloutEngine

    def __init__(self, max_lag: int) -> None:
        self._max_lag = max_lag
        self._waiting: deque[_Batch] = deque()  # not trained on yet, in order of steps
        self._syncs: deque[_Sync] = deque()
        self._fingerprint, self._moves = "", 0
        self._worker: Inline | Worker = Inline()
        self._scorer: Inline | Worker = Inline()
        self._until = 0
        self._gap: dict[str, float] = {}  # metric of the last weight sync

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine used from now on."""
        self._collector, self._rollout_engine = collector, rollouts

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Context in which to sample; samples in flight are kept at the end."""
        self._until = until
        self._syncs.clear()
        self._worker = self._scorer = Inline()
        if self._max_lag > 0:
            self._scorer = Worker("reward")
            # torch sets the threads of a thread when it first asks; engines may lower them later.
            self._scorer.submit(torch.get_num_threads).result()
            self._worker = Worker("rollout", on_end=self._scorer.close)
        threads = [*self._worker.threads, *self._scorer.threads]
        with working(threads, close=self._worker.close, drop=self._waiting.clear):
            yield

    def send(self, weight_update: WeightUpdate) -> None:
        """Load these weights after all work submitted before."""
        receipt = self._worker.submit(self._load, weight_update)
        # Without the weights, which are freed once they are loaded.
        self._syncs.append(_Sync(receipt, weight_update._replace(weights={})))

    def _load(self, weight_update: WeightUpdate) -> Receipt | None:
        receipt = self._rollout_engine.load_weights(weight_update.weights, weight_update.version)
        self._gap = sync_gap(receipt)
        return receipt

    def next_sample(self, step: int) -> Sample:
        """The sample of ``step``; also starts sampling the next ``max_lag`` steps.

        It stays in flight until ``mark_consumed``.
        """
        for batch in self._waiting:
            if batch.sample is None and batch.rollout is not None:
                # Scores that decide what is sampled next are computed in its order.
                scorer = self._worker if self._collector.more else self._scorer
                batch.sample = scorer.submit(self._collector.score, batch.rollout)
        while (ahead := step + len(self._waiting)) < self._until and ahead - step <= self._max_lag:
            self._waiting.append(self._start(ahead))
        first = self._waiting[0].sample
        assert first is not None  # submitted above
        sample = first.result()
        self._verify_syncs(wait=False)
        return sample

    def _start(self, step: int) -> _Batch:
        batch = _Batch()
        if self._max_lag == 0 or self._collector.more:  # scores decide what is sampled next
            batch.sample = self._worker.submit(self._draw, step, batch.keep)
            return batch
        sampled = self._worker.submit(self._sample, step, batch.keep)
        batch.sample = sample = Future[Sample]()
        sampled.add_done_callback(lambda done: self._scorer.submit(self._score, done, sample))
        return batch

    def _sample(
        self, step: int, on_rollout: Callable[[Rollout], None]
    ) -> tuple[Rollout, float, dict[str, float]]:
        """Responses, seconds, and the gap of the weights that they were sampled with."""
        sampled = self._collector.sample(step, self._rollout_engine, on_rollout=on_rollout)
        return *sampled, self._gap

    def _score(
        self, sampled: Future[tuple[Rollout, float, dict[str, float]]], sample: Future[Sample]
    ) -> None:
        try:
            rollout, seconds, gap = sampled.result()
            rollout, reward_output, times = self._collector.score(rollout, seconds=seconds)
        except BaseException as error:  # re-raised by result()
            sample.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            sample.set_result((rollout, reward_output, times | gap))

    def _draw(self, step: int, on_rollout: Callable[[Rollout], None]) -> Sample:
        """A sample with the gap of the weights that it was sampled with."""
        rollout, reward_output, times = self._collector.draw(
            step, self._rollout_engine, on_rollout=on_rollout
        )
        return rollout, reward_output, times | self._gap

    def mark_consumed(self) -> None:
        """Mark the last sample as consumed."""
        self._waiting.popleft()

    def recover_after_error(self, step: int) -> None:
        """After a failure in ``step``: keep the responses sampled ahead, to be scored again.

        Those after the first failed one are dropped, since the order must be reproducible; none
        are kept if scores decide what is sampled next.
        """
        wait([batch.sample for batch in self._waiting if batch.sample is not None])
        if self._collector.more:
            self._waiting.clear()
        sampled = takewhile(lambda batch: batch.rollout is not None, self._waiting)
        self._waiting = deque(_Batch(batch.rollout) for batch in sampled)

    def wait_for_syncs(self) -> None:
        """Wait for the outstanding weight syncs."""
        self._verify_syncs(wait=True)

    def _verify_syncs(self, *, wait: bool) -> None:
        while self._syncs and (wait or self._syncs[0].receipt.done()):
            receipt, sent = self._syncs.popleft()
            moved, self._moves = sent.moves > self._moves, sent.moves
            self._fingerprint = verify_sync(
                receipt.result(), sent, confirmed=self._fingerprint, moved=moved
            )

    def wait_until_idle(self) -> None:
        """Wait until no batch is being sampled."""
        _ = self.in_flight

    @property
    def in_flight(self) -> list[PendingSample]:
        """Samples not trained on yet; waits for those still being sampled."""
        return [batch.result() for batch in self._waiting]

    def restore(self, samples: list[PendingSample], step: int) -> None:
        """Use these samples for the next iterations, as after a resume.

        Samples older than ``max_lag`` allows are dropped with a warning.

        Raises:
            CheckpointError: their batch size is not that of this run.
        """
        batches = [x for x in samples if not isinstance(x, PromptBatch)]
        if len(batches) < len(samples):
            raise CheckpointError(
                "the checkpoint has single prompts that were being sampled: resume with"
                ' rollout_schedule="as_completed"'
            )
        rollouts = [x if isinstance(x, Rollout) else x[0] for x in batches]
        for n, rollout in enumerate(rollouts):
            size = len(self._collector.source.batch(step + n))
            if len(rollout) != size:
                raise CheckpointError(
                    f"samples in the checkpoint must be batches of {size} responses, got"
                    f" {len(rollout)}: resume with the same batch size and rollout_schedule"
                )
        min_versions = [step + n - self._max_lag for n in range(len(rollouts))]
        versions = [r.version[r.version >= 0].tolist() for r in rollouts]
        if any(v < low for vs, low in zip(versions, min_versions, strict=True) for v in vs):
            warnings.warn(
                f"samples in the checkpoint are too old for max_lag={self._max_lag}; they are"
                " dropped and sampled again",
                stacklevel=2,
            )
            batches = []
        self._waiting = deque(map(_finished_batch, batches))


def _finished_batch(pending: Sample | Rollout) -> _Batch:
    if isinstance(pending, Rollout):
        return _Batch(pending)
    sample: Future[Sample] = Future()
    sample.set_result(pending)
    return _Batch(pending[0], sample)
