"""Who listens to the loop: logging, evaluation, saving, callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kedge.types import Experience, RewardOutput, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished update."""

    step: int  # updates finished, this one included
    metrics: Mapping[str, float]
    rollout: Rollout
    reward_output: RewardOutput


class Hooks(Protocol):
    """Called by the loop, in this order, on every rank."""

    def on_step_begin(self, step: int) -> None:
        """Update ``step`` (0 is the first) is about to begin."""
        ...

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """The batch that update ``step`` will learn from; nothing was trained on it yet."""
        ...

    def on_experience(self, step: int, experience: Experience) -> None:
        """What update ``step`` will read of that batch, token by token."""
        ...

    def on_optimizer_step(self) -> None:
        """One optimizer step was taken."""
        ...

    def on_step_end(self, report: StepReport) -> bool:
        """An update is finished; True asks the loop to stop here."""
        ...

    def on_failure(self, step: int, error: Exception) -> None:
        """``error`` ends the run; its state is whole, as after ``step`` updates.  On all ranks."""
        ...


class NoHooks:
    """Nobody listens."""

    def on_step_begin(self, step: int) -> None:
        """Ignore."""

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """Ignore."""

    def on_experience(self, step: int, experience: Experience) -> None:
        """Ignore."""

    def on_optimizer_step(self) -> None:
        """Ignore."""

    def on_step_end(self, report: StepReport) -> bool:
        """Never stop."""
        return False

    def on_failure(self, step: int, error: Exception) -> None:
        """Ignore."""
