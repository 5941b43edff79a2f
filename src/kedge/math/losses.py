"""Per-token losses.  No reduction happens here; weights do that (``kedge.math.weights``)."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1-e, 1+e) A).  Schulman et al. 2017, eq. 7 (arXiv:1707.06347)."""
    return torch.max(-ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages)


def policy_is_clipped(ratio: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """Where the clipped term is the larger loss, so that the token gets no gradient.  bool."""
    return -ratio.clamp(1 - clip, 1 + clip) * advantages > -ratio * advantages


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """0.5 max((V-G)^2, (clip(V, V_old-e, V_old+e)-G)^2).  openai/baselines ppo2/model.py."""
    bounded = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns) ** 2, (bounded - returns) ** 2)


def value_is_clipped(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Where the clipped term is the larger value loss.  bool."""
    bounded = old + (values - old).clamp(-clip, clip)
    moved = (values - old).abs() > clip  # else the two differ by rounding alone
    return moved & ((bounded - returns) ** 2 > (values - returns) ** 2)
