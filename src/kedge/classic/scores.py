"""Running mean and deviation of scores; scaling and clipping."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(slots=True)
class RunningMoments:
    """Mean and unbiased standard deviation of everything seen so far.

        M = M_1 + M_2 + d^2 n_1 n_2 / (n_1 + n_2)        d = mean_2 - mean_1

    where M is the sum of squared distances from the mean.  Chan et al. 1979, eq. 2.1.

    Args:
        total: sums a tensor over ranks, so that all ranks have the same moments.
    """

    total: Total = _identity
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
        x = values.double()
        total, count = self.total(torch.stack([x.sum(), x.new_tensor(float(len(x)))])).tolist()
        if not count:
            return 0.0, 0.0
        mean = total / count
        squares = float(self.total(((x - mean) ** 2).sum()))
        both, gap = self.count + count, mean - self.mean
        self.squares += squares + gap**2 * self.count * count / both
        self.mean += gap * count / both
        self.count = both
        return mean, (squares / (count - 1)) ** 0.5 if count > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """The three numbers."""
        return {"mean": self.mean, "squares": self.squares, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers of ``state_dict``."""
        for name in ("mean", "squares", "count"):
            setattr(self, name, float(state[name]))

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the numbers to a file."""
        Path(json_path).write_text(json.dumps(self.state_dict()), encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | Path, total: Total = _identity) -> RunningMoments:
        """Read what ``save_to_json`` wrote."""
        moments = cls(total)
        moments.load_state_dict(json.loads(Path(json_path).read_text(encoding="utf-8")))
        return moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of responses: one per response, one per token, or both."""

    whole: Tensor  # float32 [B]
    tokens: Tensor | None = None  # float32 [B, R], 0 for responses without token scores

    @property
    def sums(self) -> Tensor:
        """Total score of each response, float32 [B]."""
        return self.whole if self.tokens is None else self.whole + self.tokens.sum(1)


def shaped(
    scores: Scores, running: RunningMoments, *, scale: bool, norm: bool, clip: float | None
) -> Scores:
    """Scores divided by the running deviation of their sums, then clipped, if enabled.

        s / (std + eps)    or, with ``norm``, (s - mean) / (std + eps)        then to [-clip, clip]

    The moments are updated with this batch first.  For a response scored per token, the mean is
    subtracted at its end; the clip applies to each score separately.
    """
    whole, tokens = scores.whole, scores.tokens
    if scale:
        running.update(scores.sums)
        factor = running.std + torch.finfo(whole.dtype).eps
        whole = (whole - running.mean) / factor if norm else whole / factor
        tokens = None if tokens is None else tokens / factor
    if clip is not None:
        whole = whole.clamp(-clip, clip)
        tokens = None if tokens is None else tokens.clamp(-clip, clip)
    return Scores(whole=whole, tokens=tokens)
