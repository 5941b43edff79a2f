"""Per-token losses, and the weights that average them into one loss.

A weighting is a tensor that sums to 1 over one *optimizer step*, over all ranks.  It is computed
before the step is split into micro-batches, so that the split cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.math.masked import AllReduce, masked_mean


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


def covariances(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, all_reduce: AllReduce
) -> Tensor:
    """(log p_t - mean log p) (A_t - mean A), with means over all tokens of the mask and all ranks.

    Tokens with large covariance drive the fall in entropy: Cui et al. 2025, section 4
    (arXiv:2505.22617).

    Args:
        logprobs: float32 [B, R].
        advantages: float32 [B, R].
        mask: bool [B, R].
        all_reduce: sums a tensor over ranks.

    Returns:
        float32 [B, R], -inf outside the mask.
    """
    gaps = [x - masked_mean(x, mask, all_reduce=all_reduce) for x in (logprobs, advantages)]
    return torch.where(mask, gaps[0] * gaps[1], -torch.inf)


def kl_cov_tokens(covariance: Tensor, *, share: float) -> Tensor:
    """The ``share`` of the tokens with the largest covariance, at least one.  bool [n].

    KL-Cov, arXiv:2505.22617, with 0.002.  ``covariance`` float32 [n] of the tokens of all ranks.
    """
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    count = min(len(covariance), max(1, round(share * len(covariance))))
    chosen[covariance.topk(count).indices] = True
    return chosen


def clip_cov_tokens(
    covariance: Tensor, *, share: float, low: float = 1.0, high: float = 5.0
) -> Tensor:
    """A ``share`` of the tokens, chosen among covariances from ``low`` to ``high``.  bool [n].

    Clip-Cov, arXiv:2505.22617, with 2e-4, draws them at random; here they are evenly
    spaced among these, so that runs are reproducible.  ``covariance`` as in ``kl_cov_tokens``.
    """
    places = ((covariance >= low) & (covariance <= high)).nonzero()[:, 0]
    count = min(len(places), max(1, round(share * len(covariance))))
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[places[torch.arange(count, device=places.device) * len(places) // max(count, 1)]] = True
    return chosen


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
