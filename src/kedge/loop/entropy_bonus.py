"""The entropy bonus of the loss, with a fixed or an adaptive coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kedge.protocols import LossFn
from kedge.types import Loss, MicroBatch, PolicyOutput

ENTROPY, COEF = "policy/entropy_avg", "policy/entropy_coef"


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

    def add_to(self, loss: LossFn) -> LossFn:
        """Add the bonus of the next optimizer step to ``loss``."""
        coef = self.coef if not self.adaptive or self.last <= self.target else 0.0

        def with_bonus(new: PolicyOutput, mb: MicroBatch) -> Loss:
            out, entropy = loss(new, mb), (mb.token_weight * new.entropy).sum()
            parts = {**out.parts, "entropy": -coef * entropy}
            return replace(out, parts=parts, metrics={**out.metrics, ENTROPY: entropy})

        return with_bonus if self.active else loss

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
