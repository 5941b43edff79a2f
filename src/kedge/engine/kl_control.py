"""KL coefficient controllers.  Ziegler et al. 2019, section 2.2 (arXiv:1909.08593)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class FixedKL:
    """A coefficient that never changes."""

    value: float

    def update(self, kl: float, episodes: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, Any]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the coefficient of ``state``."""
        self.value = float(state["value"])


@dataclass(slots=True, kw_only=True)
class AdaptiveKL:
    """Steers the measured KL toward ``target``.

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon

    Args:
        value: the coefficient to start from.
        target: wanted KL, nats per response.
        horizon: episodes over which an error of 100% would double the coefficient.
    """

    value: float
    target: float
    horizon: float

    def update(self, kl: float, episodes: int) -> None:
        """Adapt to ``kl`` nats per response measured over ``episodes`` responses."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * episodes / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """The coefficient; target and horizon are settings, not state."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the coefficient of ``state``."""
        self.value = float(state["value"])
