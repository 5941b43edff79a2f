"""What adapts or limits training: KL coefficient, entropy bonus, limits of optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.algorithms.base import Algorithm
from kedge.algorithms.transforms import add_entropy
from kedge.records.protocols import ShouldApply

ENTROPY, COEF = "policy/entropy_avg", "policy/entropy_coef"
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


@dataclass(slots=True, kw_only=True)
class EntropyBonus:
    """Adds -coef x (mean entropy per token) to the loss of any algorithm.

    The adaptive coefficient rises by ``delta`` after an optimizer step whose entropy was at most
    ``target``, else it falls; it acts only in the steps after a step at or below the target
    (Skywork-OR1, arXiv:2505.22312, as in TRL).
    """

    coef: float = 0.0  # initial value if adaptive
    adaptive: bool = False  # whether the coefficient adapts, as configured below
    target: float = 0.2  # nats per token
    delta: float = 0.005  # change of the coefficient per optimizer step
    low: float = 0.0  # bounds of the coefficient
    high: float = 1.0
    last: float = float("inf")  # entropy in nats per token at the last optimizer step

    @property
    def active(self) -> bool:
        """Whether the entropy needs a gradient in this run."""
        return self.coef != 0 or self.adaptive

    def add_to(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the bonus of the next optimizer step."""
        coef = self.coef if not self.adaptive or self.last <= self.target else 0.0
        return add_entropy(algorithm, coef) if self.active else algorithm

    def update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt to the metrics of an optimizer step; returns the coefficient as a metric."""
        if not self.active:
            return {}
        if self.adaptive:
            self.last = metrics[ENTROPY]
            step = self.delta if self.last <= self.target else -self.delta
            self.coef = min(max(self.coef + step, self.low), self.high)
        return {COEF: self.coef}

    def state_dict(self) -> dict[str, Any]:
        """The coefficient and the last entropy."""
        return {"coef": self.coef, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore coefficient and entropy of an adaptive bonus."""
        if self.adaptive and state:
            self.coef, self.last = float(state["coef"]), float(state["last"])


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
    """What acts around every optimizer step."""

    limits: StepLimits = field(default_factory=StepLimits)
    entropy_bonus: EntropyBonus = field(default_factory=EntropyBonus)
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
