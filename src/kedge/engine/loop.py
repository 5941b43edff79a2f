"""The training loop.  There is one; ``max_lag`` makes it synchronous or asynchronous.

What samples, and when, is behind ``RolloutScheduler``: in order (every number independent of
timing) or as
completed (faster where lengths differ much).
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kedge.engine.checkpoint.replay import Replayed
from kedge.engine.hooks import StepReport
from kedge.engine.rollout.as_completed import AsCompletedScheduler
from kedge.engine.rollout.collector import PendingSample, RolloutCollector, Sample
from kedge.engine.rollout.fifo import FifoScheduler
from kedge.engine.rollout.weight_sync import WeightUpdate
from kedge.engine.updater import Updater
from kedge.errors import ConfigError, RewardError, RolloutError, SyncError
from kedge.protocols import PromptSource, RewardSource, RolloutEngine
from kedge.types import Sampling


class RolloutScheduler(Protocol):
    """Where the samples of a training step come from."""

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """How samples are drawn from now on, and what draws them."""
        ...

    def open(self, step: int, until: int) -> AbstractContextManager[None]:
        """Sample for the steps from ``step`` to ``until`` while inside."""
        ...

    def send(self, weight_update: WeightUpdate) -> None:
        """Here are the newest weights."""
        ...

    def next_sample(self, step: int) -> Sample:
        """What ``step`` learns from; waits until it is there."""
        ...

    def mark_consumed(self) -> None:
        """What was taken last was trained on."""
        ...

    def recover_after_error(self, step: int) -> None:
        """After a failure at ``step``: keep of what is in flight what ``step`` can begin with."""
        ...

    def wait_for_syncs(self) -> None:
        """Wait until all weights that were sent are confirmed, as far as that is to come."""
        ...

    @property
    def in_flight(self) -> list[PendingSample]:
        """What was sampled ahead and not yet trained on; waits for what is still being sampled."""
        ...

    def restore(self, samples: list[PendingSample], step: int) -> None:
        """Take samples as already drawn, as after a resume at ``step``."""
        ...


@dataclass(slots=True, kw_only=True)
class Engine(Updater):
    """Everything one training run needs, and where it stands."""

    source: PromptSource
    rollout_engine: RolloutEngine
    reward: RewardSource
    sampling: Sampling
    max_lag: int = 0
    # that a batch is cut into, to be trained on as completed; 0: whole, in order
    partial_batches: int = 0
    scheduler: RolloutScheduler = field(init=False)
    _united: bool = field(default=True, init=False)  # a failure now is met by all ranks

    def __post_init__(self) -> None:
        if self.batch_sizes.group < self.algorithm.min_group:
            raise ConfigError(
                f"{self.algorithm.name} compares responses to one prompt: it needs num_generations"
                f" >= {self.algorithm.min_group}, got {self.batch_sizes.group}"
            )
        if self.partial_batches:
            self.scheduler = AsCompletedScheduler(self.partial_batches, self.max_lag)
        else:
            self.scheduler = FifoScheduler(self.max_lag)
        self.scheduler.configure(self._collector(), self.rollout_engine)

    def _collector(self) -> RolloutCollector:
        return RolloutCollector(
            source=self.source,
            reward=self.reward,
            sampling=self.sampling,
            algorithm=self.algorithm,
            seed=self.seed,
            clock=self.clock,
        )

    def run(self, until: int) -> None:
        """Train up to update ``until``, or until a hook asks to stop; what is in flight is kept."""
        if not self.state_consistent:
            warnings.warn(
                f"update {self.step + 1} was broken off between two of its optimizer steps, and"
                " begins anew with the weights as they are; to be exact, go on from a checkpoint",
                stacklevel=2,
            )
        # parts may have been exchanged
        self.scheduler.configure(self._collector(), self.rollout_engine)
        self._united = self.learner.world_size == 1
        with self.scheduler.open(self.step, until):
            try:
                self._train(until)
            except Exception as error:
                if self.state_consistent and self._united:
                    self._recover_after_error()
                    self.hooks.on_failure(self.step, error)
                raise

    def _train(self, until: int) -> None:
        self.scheduler.send(self._weight_update())
        stop = False
        while self.step < until and not stop:
            self.hooks.on_step_begin(self.step)
            begin = self.clock()
            rollout, reward_output, times = self._next_sample()
            metrics = self.train_on(rollout, reward_output, times, begin=begin)
            self.scheduler.mark_consumed()
            self.scheduler.send(self._weight_update())
            report = StepReport(
                step=self.step, metrics=metrics, rollout=rollout, reward_output=reward_output
            )
            stop = self.hooks.on_step_end(report)
        self.scheduler.wait_for_syncs()

    def _next_sample(self) -> Sample:
        """What this step learns from; where sampling or scoring fails on a rank, all end."""
        if self.learner.world_size == 1:
            return self.scheduler.next_sample(self.step)
        sample, failure = None, None
        try:
            sample = self.scheduler.next_sample(self.step)
        except (RewardError, RolloutError, SyncError) as error:
            failure = error  # raised where no rank waits for another: all come to the vote
        rows = 0.0 if sample is None else float(sample[1].valid.sum())
        failed, scored = self.learner.total(torch.tensor([float(sample is None), rows])).tolist()
        self._united = bool(failed) or not scored  # without any score all ranks may refuse to go on
        if failure is not None:
            raise failure
        if sample is None or failed:
            raise RolloutError("another process could not sample or score; its error says why")
        return sample

    def _recover_after_error(self) -> None:
        """Keep what is in flight, as far as it can be gone on with, by all ranks alike."""
        self.scheduler.recover_after_error(self.step)
        if isinstance(self.rollout_engine, Replayed):  # a recording gives it out once more
            self.scheduler.restore([], self.step)
        if self.learner.world_size > 1:
            mine = torch.zeros(self.max_lag + 2)
            mine[len(self.scheduler.in_flight)] = 1.0
            if not bool((self.learner.total(mine) == self.learner.world_size).any()):
                self.scheduler.restore([], self.step)

    def _weight_update(self) -> WeightUpdate:
        return WeightUpdate(
            weights={} if self.rollout_engine.shares_weights else self.learner.weights(),
            version=self.learner.version,
            fingerprint=self.learner.fingerprint(),
            step=self.step,
            moves=self._moves,
        )

    @property
    def in_flight(self) -> list[PendingSample]:
        """What was sampled ahead and not yet trained on; waits for what is still being sampled."""
        return self.scheduler.in_flight

    def restore(self, samples: list[PendingSample]) -> None:
        """Take samples as already drawn for the next updates, as after a resume."""
        self.scheduler.restore(samples, self.step)
