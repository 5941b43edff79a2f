"""Per-token losses, and the weights that average them into one loss.

A weighting is a tensor that sums to 1 over one *optimizer step*, over all ranks.  It is computed
before the step is split into micro-batches, so that the split cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.math.masked import AllReduce


def _count(mask: Tensor, all_reduce: AllReduce) -> Tensor:
    return all_reduce(mask.sum().to(torch.float32)).clamp(min=1)


def token_mean(mask: Tensor, all_reduce: AllReduce) -> Tensor:
    """Every real token has the same weight.  bool [B, R] -> float32 [B, R]."""
    return mask / _count(mask, all_reduce)


def row_mean(mask: Tensor, all_reduce: AllReduce) -> Tensor:
    """Every row with a real token has the same weight.  bool [B, R] -> float32 [B]."""
    trained = mask.any(1)
    return trained / _count(trained, all_reduce)


def row_then_token_mean(mask: Tensor, all_reduce: AllReduce) -> Tensor:
    """Every response has the same weight, whatever its length (GRPO, arXiv:2402.03300)."""
    return row_mean(mask, all_reduce)[:, None] * mask / mask.sum(1, keepdim=True).clamp(min=1)


WEIGHTINGS: dict[str, Callable[[Tensor, AllReduce], Tensor]] = {
    "token_mean": token_mean,
    "row_then_token_mean": row_then_token_mean,
}


class Clip(NamedTuple):
    """Where probability ratios are clipped.

    ``high`` is the clip-higher of DAPO (arXiv:2503.14476).  ``ceiling`` bounds the loss of a
    token with negative advantage: dual clip, Ye et al. 2020 (arXiv:1912.09729), also called
    "two-sided clipping".

    Args:
        low: e, the clip below 1.
        high: the clip above 1; None is ``low``.
        ceiling: largest ratio where the advantage is negative, above 1 + high; None: no limit.
    """

    low: float
    high: float | None = None
    ceiling: float | None = None

    @property
    def top(self) -> float:
        """Upper clipping bound of the ratio."""
        return 1 + (self.low if self.high is None else self.high)


class RatioMask(NamedTuple):
    """Ratios that give a gradient: 1 - low < r < 1 + high, whatever the sign of the advantage."""

    low: float
    high: float


ClipRange = float | tuple[float, float] | Clip  # epsilon; low and high; all three


def as_clip(clip: ClipRange) -> Clip:
    """The ``Clip`` of one number, of a pair, or of itself."""
    return Clip(*clip) if isinstance(clip, tuple) else Clip(clip)


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, *, clip: ClipRange) -> Tensor:
    """-min(ratio A, clip(ratio, 1-e, 1+e_high) A), with the first ratio at most ``ceiling``.

    Schulman et al. 2017, eq. 7 (arXiv:1707.06347).

    Args:
        ratio: float [*].
        advantages: float, of the same shape.
        clip: e, or a ``Clip``.
    """
    c = as_clip(clip)
    bounded = ratio if c.ceiling is None else ratio.clamp(max=c.ceiling)
    return torch.max(-bounded * advantages, -ratio.clamp(1 - c.low, c.top) * advantages)


def policy_is_clipped(ratio: Tensor, advantages: Tensor, *, clip: ClipRange) -> Tensor:
    """Where ``clipped_policy_loss`` gives the token no gradient.  bool."""
    c = as_clip(clip)
    clipped = -ratio.clamp(1 - c.low, c.top) * advantages > -ratio * advantages
    return clipped if c.ceiling is None else clipped | ((ratio > c.ceiling) & (advantages < 0))


def masked_policy_loss(ratio: Tensor, advantages: Tensor, *, bounds: RatioMask) -> Tensor:
    """-r A where 1 - low < r < 1 + high, and 0 elsewhere, whatever the sign of A.

    "Direct double-sided importance sampling" with r = pi / pi_rollout: eq. 1 and 3 of SAO, Hou et
    al. 2026 (arXiv:2607.07508), with low 0.3 and high 5.

    Args:
        ratio: float [*], with gradient.
        advantages: float [*].
        bounds: low and high.
    """
    return torch.where(policy_is_masked(ratio, bounds), 0.0, -ratio * advantages)


def policy_is_masked(ratio: Tensor, bounds: RatioMask) -> Tensor:
    """Where ``masked_policy_loss`` leaves the token out.  bool."""
    return (ratio <= 1 - bounds.low) | (ratio >= 1 + bounds.high)


def weighted_policy_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, top: float
) -> Tensor:
    """-sg(min(ratio, top)) A log p: every token keeps a gradient, with a bounded weight.

    CISPO, MiniMax-M1 (arXiv:2506.13585), without a lower bound, as in the paper's experiments.

    Args:
        logprobs: float [*], with gradient.
        ratio: float [*].
        advantages: float [*].
        top: the largest weight.
    """
    return -ratio.detach().clamp(max=top) * advantages * logprobs


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """0.5 max((V-G)^2, (clip(V, V_old-e, V_old+e)-G)^2).  openai/baselines ppo2/model.py."""
    bounded = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns) ** 2, (bounded - returns) ** 2)


def value_is_clipped(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Where the clipped term is the larger value loss.  bool."""
    bounded = old + (values - old).clamp(-clip, clip)
    moved = (values - old).abs() > clip  # smaller gaps are rounding
    return moved & ((bounded - returns) ** 2 > (values - returns) ** 2)
