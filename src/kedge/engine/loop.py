"""The training loop.  There is one; ``max_lag`` makes it synchronous or asynchronous.

What samples, and when, is behind ``Supply``: in order (every number independent of timing) or as
completed (faster where lengths differ much).
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kedge.engine.as_completed import AsCompleted
from kedge.engine.drawing import Ahead, Drawing, Sample
from kedge.engine.hooks import StepReport
from kedge.engine.in_order import InOrder
from kedge.engine.receipts import Shipment
from kedge.engine.recording import Replayed
from kedge.engine.updater import Updater
from kedge.errors import ConfigError, RewardError, RolloutError, SyncError
from kedge.protocols import PromptSource, RewardSource, RolloutEngine
from kedge.types import Sampling


class Supply(Protocol):
    """Where the samples of a training step come from."""

    def draw_with(self, drawing: Drawing, rollouts: RolloutEngine) -> None:
        """How samples are drawn from now on, and what draws them."""
        ...

    def open(self, step: int, until: int) -> AbstractContextManager[None]:
        """Sample for the steps from ``step`` to ``until`` while inside."""
        ...

    def send(self, shipment: Shipment) -> None:
        """Here are the newest weights."""
        ...

    def take(self, step: int) -> Sample:
        """What ``step`` learns from; waits until it is there."""
        ...

    def spend(self) -> None:
        """What was taken last was trained on."""
        ...

    def salvage(self, step: int) -> None:
        """After a failure at ``step``: keep of what is in flight what ``step`` can begin with."""
        ...

    def settle(self) -> None:
        """Wait until all weights that were sent are confirmed, as far as that is to come."""
        ...

    @property
    def in_flight(self) -> list[Ahead]:
        """What was sampled ahead and not yet trained on; waits for what is still being sampled."""
        ...

    def put_back(self, samples: list[Ahead], step: int) -> None:
        """Take samples as already drawn, as after a resume at ``step``."""
        ...


@dataclass(slots=True, kw_only=True)
class Engine(Updater):
    """Everything one training run needs, and where it stands."""

    source: PromptSource
    rollouts: RolloutEngine
    judge: RewardSource
    sampling: Sampling
    max_lag: int = 0
    pieces: int = 0  # that a batch is cut into, to be trained on as completed; 0: whole, in order
    supply: Supply = field(init=False)
    _united: bool = field(default=True, init=False)  # a failure now is met by all ranks

    def __post_init__(self) -> None:
        if self.plan.group < self.algorithm.min_group:
            raise ConfigError(
                f"{self.algorithm.name} compares responses to one prompt: it needs num_generations"
                f" >= {self.algorithm.min_group}, got {self.plan.group}"
            )
        if self.pieces:
            self.supply = AsCompleted(self.pieces, self.max_lag)
        else:
            self.supply = InOrder(self.max_lag)
        self.supply.draw_with(self._drawing(), self.rollouts)

    def _drawing(self) -> Drawing:
        return Drawing(
            source=self.source,
            judge=self.judge,
            sampling=self.sampling,
            algorithm=self.algorithm,
            seed=self.seed,
            clock=self.clock,
        )

    def run(self, until: int) -> None:
        """Train up to update ``until``, or until a hook asks to stop; what is in flight is kept."""
        if not self.whole:
            warnings.warn(
                f"update {self.step + 1} was broken off between two of its optimiser steps, and"
                " begins anew with the weights as they are; to be exact, go on from a checkpoint",
                stacklevel=2,
            )
        self.supply.draw_with(self._drawing(), self.rollouts)  # parts may have been exchanged
        self._united = self.learner.ranks == 1
        with self.supply.open(self.step, until):
            try:
                self._train(until)
            except Exception as error:
                if self.whole and self._united:
                    self._salvage()
                    self.hooks.on_failure(self.step, error)
                raise

    def _train(self, until: int) -> None:
        self.supply.send(self._shipment())
        stop = False
        while self.step < until and not stop:
            self.hooks.on_step_begin(self.step)
            begin = self.clock()
            rollout, judgement, times = self._take()
            metrics = self.train_on(rollout, judgement, times, begin=begin)
            self.supply.spend()
            self.supply.send(self._shipment())
            report = StepReport(
                step=self.step, metrics=metrics, rollout=rollout, judgement=judgement
            )
            stop = self.hooks.on_step_end(report)
        self.supply.settle()

    def _take(self) -> Sample:
        """What this step learns from; where sampling or scoring fails on a rank, all end."""
        if self.learner.ranks == 1:
            return self.supply.take(self.step)
        sample, failure = None, None
        try:
            sample = self.supply.take(self.step)
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

    def _salvage(self) -> None:
        """Keep what is in flight, as far as it can be gone on with, by all ranks alike."""
        self.supply.salvage(self.step)
        if isinstance(self.rollouts, Replayed):  # a recording gives it out once more
            self.supply.put_back([], self.step)
        if self.learner.ranks > 1:
            mine = torch.zeros(self.max_lag + 2)
            mine[len(self.supply.in_flight)] = 1.0
            if not bool((self.learner.total(mine) == self.learner.ranks).any()):
                self.supply.put_back([], self.step)

    def _shipment(self) -> Shipment:
        return Shipment(
            weights={} if self.rollouts.live else self.learner.weights(),
            version=self.learner.version,
            fingerprint=self.learner.fingerprint(),
            step=self.step,
            moves=self._moves,
        )

    @property
    def in_flight(self) -> list[Ahead]:
        """What was sampled ahead and not yet trained on; waits for what is still being sampled."""
        return self.supply.in_flight

    def put_back(self, samples: list[Ahead]) -> None:
        """Take samples as already drawn for the next updates, as after a resume."""
        self.supply.put_back(samples, self.step)
