"""Whole batches in order: the schedule and all results are independent of timing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import takewhile

from kedge.records.errors import CheckpointError
from kedge.records.protocols import RolloutEngine
from kedge.records.types import PromptBatch, Rollout, Sample
from kedge.rollout.scheduler.collector import PendingSample, RolloutCollector
from kedge.rollout.scheduler.scheduler import RolloutScheduler
from kedge.rollout.scheduler.worker import EngineWorker, SampledNumbers, WeightUpdate


class FifoScheduler(RolloutScheduler):
    """Whole batches, each exactly ``min(step, max_lag)`` iterations old.

    The dispatcher numbers iterations.  The rollout engine starts all that may start with the
    weights that it has before it loads the next ones, in the order in which they were sent.  At lag
    0 it samples in the driver's thread.
    """

    def __init__(self, max_lag: int) -> None:
        super().__init__(0, max_lag)
        self._scored: dict[int, Sample] = {}  # samples not trained on yet, by iteration

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine used from now on."""
        self.collector = collector
        self._workers = [EngineWorker(engine=rollouts, slots=0)]

    def _begin(self, step: int) -> None:
        self._requeue(self._waiting(), step)

    def _waiting(self) -> list[Sample | Rollout]:
        """Samples not trained on yet; unscored responses come last."""
        scored = [sample for number, sample in self._scored.items() if number >= self._step]
        return [*scored, *(x.rollout for x in (*self._scoring, *self._sampled))]

    def _request(self, step: int) -> None:
        """Also request the next ``max_lag`` iterations."""
        self._dispatcher.end = min(self._until, step + self._dispatcher.max_lag + 1)

    def _next_work(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        if worker.update is not None:
            numbers = self._dispatcher.start(worker.update.step, 1)
            if numbers:
                return None, numbers
        return (self._updates.popleft(), []) if self._updates else None

    def _sample(self, worker: EngineWorker, numbers: list[int]) -> None:
        for step in numbers:
            self._sample_rows(worker, step, [step])

    def _add(self, sampled: Sequence[SampledNumbers], sample: Sample) -> None:
        for batch in sampled:
            self._dispatcher.complete(batch.numbers, batch.step)
            self._scored[batch.numbers[0]] = sample

    def _take(self, step: int) -> list[list[Sample]] | None:
        self._scored.pop(step - 1, None)
        return None if self._dispatcher.take(step) is None else [[self._scored[step]]]

    def _join(self, samples: list[Sample], step: int) -> Sample:
        (sample,) = samples
        return sample

    def wait_for_syncs(self) -> None:
        """Wait until the engine has loaded the last weights."""
        (worker,) = self._workers
        with self._lock:
            while self._num_sampling and (self._updates or worker.busy):
                self._changed.wait()
            loaded = worker.update is not None and worker.update.step == self._step
            if self._failure is not None and not loaded:
                raise self._failure

    def wait_until_idle(self) -> None:
        """Wait until all requested samples are scored."""
        (worker,), dispatcher = self._workers, self._dispatcher

        def at_work() -> bool:
            to_sample = (
                dispatcher.next < dispatcher.end or worker.busy or self._sampled or self._scoring
            )
            return bool(self._num_sampling and (to_sample or self._updates))

        with self._lock:
            self._wait_while(at_work)

    @property
    def in_flight(self) -> list[PendingSample]:
        """Samples not trained on yet; waits for those still being sampled."""
        self.wait_until_idle()
        with self._lock:
            return [*self._waiting()]

    def _recover(self, step: int) -> None:
        """Keep the responses sampled ahead, to be scored again if ``_requeue`` finds that they can.

        Those after the first failed one were not sampled, since the order must be reproducible;
        none are kept if scores decide what is sampled next.
        """
        rollouts = [x if isinstance(x, Rollout) else x.rollout for x in self._waiting()]
        self._requeue([] if self.collector.more else rollouts, step)

    def _clear(self, step: int) -> None:
        self._requeue([], step)

    def _requeue(self, batches: Sequence[Sample | Rollout], step: int) -> None:
        """Queue these batches from ``step`` on, scored or to be scored.

        Those from the first one on that can be scored no more are sampled again, with their seeds.
        """
        batches = [*takewhile(lambda x: not self._without_environments(x), batches)]
        self._scored.clear()
        self._sampled.clear()
        self._scoring.clear()
        self._dispatcher.clear(step)
        self._dispatcher.end = step + len(batches)
        self._dispatcher.start(self._dispatcher.end, len(batches))
        for number, batch in enumerate(batches, step):
            if isinstance(batch, Sample):
                self._scored[number] = batch
                self._dispatcher.complete([number], step)
            else:
                self._sampled.append(SampledNumbers(rollout=batch, numbers=[number], step=step))

    def _without_environments(self, batch: Sample | Rollout) -> bool:
        """Whether rewards would need environments that are closed or reused by now."""
        reads = getattr(self.collector.reward, "reads_environments", False)
        return isinstance(batch, Rollout) and batch.episodes is not None and reads

    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use these samples for the next iterations, as after a resume.

        Samples older than ``max_lag`` allows are dropped with a warning.
        """
        batches = [x for x in samples if not isinstance(x, PromptBatch)]
        if len(batches) < len(samples):
            raise CheckpointError(
                "the checkpoint has single prompts that were being sampled: resume with"
                ' rollout_schedule="as_completed"'
            )
        max_lag = self._dispatcher.max_lag
        for number, batch in enumerate(batches, step):
            rollout = batch if isinstance(batch, Rollout) else batch.rollout
            size = len(self.collector.source.batch(number))
            if len(rollout) != size:
                raise CheckpointError(
                    f"samples in the checkpoint must be batches of {size} responses, got"
                    f" {len(rollout)}: resume with the same batch size and rollout_schedule"
                )
            known = rollout.policy_version >= 0
            if bool((known & (rollout.policy_version < number - max_lag)).any()):
                warnings.warn(
                    f"samples in the checkpoint are too old for max_lag={max_lag}; they are"
                    " dropped and sampled again",
                    stacklevel=2,
                )
                batches = []
                break
        self._requeue(batches, step)
