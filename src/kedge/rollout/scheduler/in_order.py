"""Next in order: whole batches; the schedule and all results are independent of timing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile

from kedge.records.errors import CheckpointError
from kedge.records.protocols import RewardInfo, RolloutEngine, read_info
from kedge.records.types import PromptBatch, Rollout, Sample
from kedge.rollout.scheduler.collector import PendingSample, RolloutCollector
from kedge.rollout.scheduler.dispatch import Dispatcher
from kedge.rollout.scheduler.state import SchedulerState
from kedge.rollout.scheduler.worker import EngineWorker, SampledNumbers, WeightUpdate

logger = logging.getLogger(__name__)


class InOrder:
    """Whole batches, each exactly ``min(step, max_lag)`` iterations old.

    The dispatcher numbers iterations.  The rollout engine loads weights in the order in
    which they were sent, and before that starts all that may be sampled with its current ones.
    """

    def __init__(self, max_lag: int) -> None:
        self.state = SchedulerState(
            dispatcher=Dispatcher(per_step=1, max_lag=max_lag), updates=deque()
        )
        self._scored: dict[int, Sample] = {}  # samples not trained on yet, by iteration

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine used from now on."""
        self.state.collector = collector
        self.state.workers = [EngineWorker(engine=rollouts, slots=0)]

    def begin(self, step: int) -> None:
        """Keep what was sampled before."""
        self._requeue(self._waiting(), step)

    def _waiting(self) -> list[Sample | Rollout]:
        """Samples not trained on yet; unscored responses come last."""
        state = self.state
        scored = [sample for number, sample in self._scored.items() if number >= state.step]
        return [*scored, *(x.rollout for x in (*state.scoring, *state.sampled))]

    def request(self, step: int) -> None:
        """Also request the next ``max_lag`` iterations."""
        dispatcher = self.state.dispatcher
        dispatcher.end = min(self.state.until, step + dispatcher.max_lag + 1)

    def next_work(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        """All that may start with the weights that the engine has, then the next weights."""
        updates = self.state.updates
        if worker.update is not None:
            numbers = self.state.dispatcher.start(worker.update.step, 1)
            if numbers:
                return None, numbers
        return (updates.popleft(), []) if updates else None

    def sample(self, worker: EngineWorker, numbers: list[int]) -> None:
        """Sample the batches of these iterations."""
        for step in numbers:
            self.state.sample(worker, step, add=self.add)

    def add(self, sampled: Sequence[SampledNumbers], sample: Sample) -> None:
        """Store the scored batch."""
        for batch in sampled:
            self.state.dispatcher.complete(batch.numbers, batch.step)
            self._scored[batch.numbers[0]] = sample

    def take(self, step: int) -> list[list[Sample]] | None:
        """The batch of ``step``, kept until the next is taken."""
        self._scored.pop(step - 1, None)
        return None if self.state.dispatcher.take(step) is None else [[self._scored[step]]]

    def join(self, parts: Callable[[], list[list[Sample]]], step: int) -> Sample:
        """The batch itself: every rank samples its own."""
        ((sample,),) = parts()
        return sample

    def wait_for_syncs(self) -> None:
        """Wait until the engine has loaded the last weights."""
        state, (worker,) = self.state, self.state.workers
        with state.lock:
            while state.num_sampling and (state.updates or worker.busy):
                state.changed.wait()
            loaded = worker.update is not None and worker.update.step == state.step
            if state.failure is not None and not loaded:
                raise state.failure

    def wait_until_idle(self) -> None:
        """Wait until all requested samples are scored."""
        state, (worker,), dispatcher = self.state, self.state.workers, self.state.dispatcher

        def at_work() -> bool:
            to_sample = dispatcher.next < dispatcher.end or worker.busy
            to_score = state.sampled or state.scoring
            return bool(state.num_sampling and (to_sample or to_score or state.updates))

        with state.lock:
            state.wait_while(at_work)

    def in_flight(self) -> list[PendingSample]:
        """Samples not trained on yet; waits for those still being sampled."""
        self.wait_until_idle()
        with self.state.lock:
            return [*self._waiting()]

    def recover(self, step: int) -> None:
        """Keep the responses sampled ahead, to be scored again if ``_requeue`` finds that they can.

        Those after the first failed one were not sampled, since the order must be reproducible;
        none are kept if scores decide what is sampled next.
        """
        rollouts = [x if isinstance(x, Rollout) else x.rollout for x in self._waiting()]
        self._requeue([] if self.state.collector.more else rollouts, step)

    def clear(self, step: int) -> None:
        """Drop all samples."""
        self._requeue([], step)

    def _requeue(self, batches: Sequence[Sample | Rollout], step: int) -> None:
        """Queue these batches from ``step`` on, scored or to be scored.

        Those from the first one on that can be scored no more are sampled again, with their seeds.
        """
        state, dispatcher = self.state, self.state.dispatcher
        batches = [*takewhile(lambda x: not self._without_environments(x), batches)]
        self._scored.clear()
        state.drop_sampled()
        dispatcher.clear(step)
        dispatcher.end = step + len(batches)
        dispatcher.start(dispatcher.end, len(batches))
        for number, batch in enumerate(batches, step):
            if isinstance(batch, Sample):
                self._scored[number] = batch
                dispatcher.complete([number], step)
            else:
                state.sampled.append(SampledNumbers(rollout=batch, numbers=[number], step=step))

    def _without_environments(self, batch: Sample | Rollout) -> bool:
        """Whether rewards would need environments that are closed or reused by now."""
        reads = read_info(self.state.collector.reward, RewardInfo).reads_environments
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
        max_lag = self.state.dispatcher.max_lag
        for number, batch in enumerate(batches, step):
            rollout = batch if isinstance(batch, Rollout) else batch.rollout
            size = len(self.state.collector.source.batch(number))
            if len(rollout) != size:
                raise CheckpointError(
                    f"samples in the checkpoint must be batches of {size} responses, got"
                    f" {len(rollout)}: resume with the same batch size and rollout_schedule"
                )
            known = rollout.policy_version >= 0
            if bool((known & (rollout.policy_version < number - max_lag)).any()):
                logger.warning(
                    "samples in the checkpoint are too old for max_lag=%d; they are dropped and"
                    " sampled again",
                    max_lag,
                )
                batches = []
                break
        self._requeue(batches, step)
