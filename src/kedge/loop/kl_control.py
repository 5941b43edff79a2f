"""KL coefficient controllers.  Ziegler et al. 2019, section 2.2 (arXiv:1909.08593)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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

    Target and horizon are settings, not state.

    Args:
        value: initial coefficient.
        target: KL target, nats per response.
        horizon: episodes over which an error of 100% would double the coefficient.
    """

    target: float
    horizon: float

    def update(self, kl: float, episodes: int) -> None:
        """Adapt to ``kl`` nats per response measured over ``episodes`` responses."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * episodes / self.horizon
