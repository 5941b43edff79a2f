"""The training loop, the only one; ``max_lag`` makes it synchronous or asynchronous.

``RolloutScheduler`` decides when to sample: in order (results do not depend on timing) or as
completed (faster if response lengths vary a lot).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kedge.checkpoint.replay import RolloutReplay
from kedge.loop.updater import Updater
from kedge.records.errors import RewardError, RolloutError, SyncError
from kedge.records.protocols import EngineInfo, PromptSource, RewardSource, RolloutEngine, read_info
from kedge.records.types import Sample, Sampling, StepReport
from kedge.rollout.scheduler.as_completed import AsCompleted
from kedge.rollout.scheduler.collector import PendingSample, RolloutCollector
from kedge.rollout.scheduler.in_order import InOrder
from kedge.rollout.scheduler.scheduler import RolloutScheduler
from kedge.rollout.scheduler.worker import WeightUpdate

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Engine(Updater):
    """The components and the state of a training run."""

    source: PromptSource
    rollout_engine: RolloutEngine
    reward: RewardSource
    sampling: Sampling
    max_lag: int = 0
    as_completed: bool = False  # train on what was done first; False: whole batches in order
    in_flight_weight_updates: bool = False  # load weights during sampling, "as completed" only
    scheduler: RolloutScheduler = field(init=False)
    _all_ranks_fail: bool = field(default=True, init=False)  # a failure now is raised everywhere
    _in_epoch: bool = field(default=False, init=False)  # within a pass over the prompts

    def __post_init__(self) -> None:
        order: InOrder | AsCompleted = InOrder(self.max_lag)
        if self.as_completed:
            order = AsCompleted(
                self.max_lag,
                in_flight=self.in_flight_weight_updates,
                ranks=read_info(self.rollout_engine, EngineInfo).ranks,
            )
        self.scheduler = RolloutScheduler(order)
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
        """Train to iteration ``until`` or until a hook stops it; samples in flight are kept."""
        if not self.state_consistent:
            logger.warning(
                "iteration %d was interrupted between optimizer steps and restarts with the current"
                " weights; for exact results, resume from a checkpoint",
                self.step + 1,
            )
        # the caller may have replaced components
        self.scheduler.configure(self._collector(), self.rollout_engine)
        self._all_ranks_fail = self.learner.world_size == 1
        self._in_epoch = False
        with self.scheduler.open(self.step, until):
            try:
                self._train(until)
            except Exception as error:
                if self.state_consistent and self._all_ranks_fail:
                    self._recover_after_error()
                    for hook in self.hooks:
                        hook.on_failure(self.step, error)
                raise
        if self._in_epoch:
            self._end_epoch()

    def _train(self, until: int) -> None:
        self.scheduler.send(self._weight_update())
        stop = False
        while self.step < until and not stop:
            self._begin_step()
            begin = self.clock()
            sample = self._next_sample()
            if self.rollout_engine.logprob_kind == "raw" and self.sampling.changes_logprobs:
                # They are of another distribution than the learner's, and compare with nothing.
                rollout = replace(sample.rollout, behavior_logprobs=None)
                sample = replace(sample, rollout=rollout)
            metrics = self.train_on(sample, begin=begin)
            self.scheduler.send(self._weight_update())
            report = StepReport(
                step=self.step,
                metrics=metrics,
                rollout=sample.rollout,
                reward_output=sample.reward_output,
            )
            stop = any([hook.on_step_end(report) for hook in self.hooks])
            if self._passes(self.step) > self._passes(self.step - 1):
                stop = self._end_epoch() or stop
        self.scheduler.wait_for_syncs()

    def _passes(self, step: int) -> int:
        """Whole passes over the prompts after ``step`` iterations."""
        return math.floor(step / self.batch_sizes.epoch_length + 1e-9)

    def _begin_step(self) -> None:
        for hook in self.hooks if not self._in_epoch else ():
            hook.on_epoch_begin()
        self._in_epoch = True
        for hook in self.hooks:
            hook.on_step_begin(self.step)

    def _end_epoch(self) -> bool:
        self._in_epoch = False
        return any([hook.on_epoch_end() for hook in self.hooks])

    def _next_sample(self) -> Sample:
        """The sample of this iteration; a failure on one rank stops all ranks."""
        if self.learner.world_size == 1:
            return self.scheduler.next_sample(self.step)
        sample, failure = None, None
        try:
            sample = self.scheduler.next_sample(self.step)
        except (RewardError, RolloutError, SyncError) as error:
            failure = error  # not in a collective: all ranks still reach the vote
        rows = 0.0 if sample is None else float(sample.reward_output.valid.sum())
        failed, scored = self.learner.all_reduce(
            torch.tensor([float(sample is None), rows])
        ).tolist()
        self._all_ranks_fail = bool(failed) or not scored  # without any score, every rank may raise
        if failure is not None:
            raise failure
        if sample is None or failed:
            raise RolloutError(
                "sampling or scoring failed on another rank; see the error of that rank"
            )
        return sample

    def _recover_after_error(self) -> None:
        """Keep the samples in flight that can be reused, the same on all ranks."""
        self.scheduler.recover_after_error(self.step)
        if isinstance(self.rollout_engine, RolloutReplay):  # a recording can be read again
            self.scheduler.restore([], self.step)
        if self.learner.world_size > 1:
            counts = torch.zeros(self.max_lag + 2)
            counts[len(self.scheduler.in_flight)] = 1.0
            if not bool((self.learner.all_reduce(counts) == self.learner.world_size).any()):
                self.scheduler.restore([], self.step)

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's weights for the rollout engine; empty if it shares them.  Collective."""
        try:
            return {} if self.rollout_engine.shares_weights else self.learner.weights()
        except SyncError:
            self._all_ranks_fail = True
            raise

    def _weight_update(self) -> WeightUpdate:
        return WeightUpdate(
            weights=self.weights(),
            version=self.learner.version,
            fingerprint=self.learner.fingerprint(),
            step=self.step,
            moves=self._moves,
        )

    @property
    def in_flight(self) -> list[PendingSample]:
        """The state of samples that are not trained on yet, for a checkpoint."""
        return self.scheduler.in_flight

    def restore(self, samples: list[PendingSample]) -> None:
        """Use these samples for the next iterations, as after a resume."""
        self.scheduler.restore(samples, self.step)
