"""Hooks of the training loop: logging, evaluation, saving, callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kedge.types import Experience, RewardOutput, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished iteration."""

    step: int  # iterations finished, including this one
    metrics: Mapping[str, float]
    rollout: Rollout
    reward_output: RewardOutput


class Hooks:
    """Called by the loop, in this order, on every rank; these do nothing."""

    def on_step_begin(self, step: int) -> None:
        """Iteration ``step`` (from 0) is about to begin."""

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """The batch of iteration ``step``, before training on it."""

    def on_experience(self, step: int, experience: Experience) -> None:
        """The per-token training data of iteration ``step``."""

    def on_optimizer_step(self) -> None:
        """One optimizer step is done."""

    def on_step_end(self, report: StepReport) -> bool:
        """An iteration is finished; return True to stop the loop."""
        return False

    def on_failure(self, step: int, error: Exception) -> None:
        """``error`` ends the run on all ranks; its state is that after ``step`` iterations."""
