"""Moments of everything seen so far in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class RunningMoments:
    """Running mean and unbiased standard deviation.

        M = M_1 + M_2 + d^2 n_1 n_2 / (n_1 + n_2)        d = mean_2 - mean_1

    where M is the sum of squared distances from the mean.  Chan et al. 1979, eq. 2.1.

    Args:
        total: sums a tensor over ranks, so that their moments are equal; None: a single rank.
    """

    total: Total | None = None
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean
    count: float = 0.0

    @property
    def var(self) -> float:
        """Unbiased variance; 1 with fewer than two values."""
        return self.squares / (self.count - 1) if self.count > 1 else 1.0

    @property
    def std(self) -> float:
        """Square root of ``var``."""
        return self.var**0.5

    def update(self, values: Tensor) -> tuple[float, float]:
        """Add values float [n] of every rank; returns the mean and deviation of the new values."""
        x, total = values.double(), self.total or (lambda x: x)
        added, count = total(torch.stack([x.sum(), x.new_tensor(float(len(x)))])).tolist()
        if not count:
            return 0.0, 0.0
        mean = added / count
        squares = float(total(((x - mean) ** 2).sum()))
        both, gap = self.count + count, mean - self.mean
        self.squares += squares + gap**2 * self.count * count / both
        self.mean += gap * count / both
        self.count = both
        return mean, (squares / (count - 1)) ** 0.5 if count > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Mean, count and sum of squares."""
        return {"mean": self.mean, "squares": self.squares, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        for name in ("mean", "squares", "count"):
            setattr(self, name, float(state[name]))
