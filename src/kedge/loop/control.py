"""What adapts or limits training: KL coefficient, limits of optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.records.protocols import ShouldApply

RATIO = "val/ratio"
KL = "policy/policykl_avg"


@dataclass(slots=True, kw_only=True)
class FixedKL:
    """A constant coefficient."""

    value: float

    def update(self, kl: float, episodes: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient."""
        self.value = float(state["value"])


@dataclass(slots=True, kw_only=True)
class AdaptiveKL(FixedKL):
    """Adapts the coefficient so that the measured KL approaches ``target``.

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon

    Ziegler et al. 2019, section 2.2 (arXiv:1909.08593): a single noisy batch moves it little.
    Target and horizon are settings, not state.
    """

    target: float  # nats per response
    horizon: float  # episodes over which an error of 100% would double the coefficient

    def update(self, kl: float, episodes: int) -> None:
        """Adapt to ``kl`` nats per response measured over ``episodes`` responses."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * episodes / self.horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Decides about each optimizer step after its backward pass and before it is applied.

    Limits are compared with means over all tokens of the step on all ranks, so that all ranks
    make the same decision.
    """

    max_ratio: float | None = None  # skip steps with a larger mean probability ratio
    # nats per token; stop training on the batch once the KL to the behavior policy exceeds it
    max_kl: float | None = None
    keep_last: bool = False  # whether the step that exceeds ``max_kl`` is still applied

    def should_apply(self, metrics: Mapping[str, float]) -> bool:
        """Whether to apply the step with these metrics."""
        over_ratio = self.max_ratio is not None and metrics[RATIO] > self.max_ratio
        return not over_ratio and (self.keep_last or not self.should_stop(metrics))

    def should_stop(self, metrics: Mapping[str, float]) -> bool:
        """Whether the step with these metrics is the last of the iteration."""
        return self.max_kl is not None and metrics[KL] > self.max_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class StepControl:
    """The limits and hooks that apply to every optimizer step."""

    limits: StepLimits = field(default_factory=StepLimits)
    entropy_coef: float = 0.0  # weight of the mean entropy per token, which the loss subtracts
    before_step: Callable[[], None] = lambda: None  # a step is about to be applied
    after_step: Callable[[], None] = lambda: None

    def apply_if(self, trains: bool, should_apply: ShouldApply) -> ShouldApply:
        """Whether to apply a step: only if anything ``trains``, and ``before_step`` is called."""

        def apply(metrics: Mapping[str, float]) -> bool:
            applies = trains and should_apply(metrics)
            if applies:
                self.before_step()
            return applies

        return apply
