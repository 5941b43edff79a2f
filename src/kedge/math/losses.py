"""Per-token losses without reduction; weights (``kedge.math.loss_weights``) do that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, *, clip: float | Clip) -> Tensor:
    """-min(ratio A, clip(ratio, 1-e, 1+e_high) A), with the first ratio at most ``ceiling``.

    Schulman et al. 2017, eq. 7 (arXiv:1707.06347).

    Args:
        ratio: float [*].
        advantages: float, of the same shape.
        clip: e, or a ``Clip``.
    """
    c = clip if isinstance(clip, Clip) else Clip(clip)
    bounded = ratio if c.ceiling is None else ratio.clamp(max=c.ceiling)
    return torch.max(-bounded * advantages, -ratio.clamp(1 - c.low, c.top) * advantages)


def policy_is_clipped(ratio: Tensor, advantages: Tensor, *, clip: float | Clip) -> Tensor:
    """Where ``clipped_policy_loss`` gives the token no gradient.  bool."""
    c = clip if isinstance(clip, Clip) else Clip(clip)
    clipped = -ratio.clamp(1 - c.low, c.top) * advantages > -ratio * advantages
    return clipped if c.ceiling is None else clipped | ((ratio > c.ceiling) & (advantages < 0))


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
    moved = (values - old).abs() > clip  # else the two differ by rounding only
    return moved & ((bounded - returns) ** 2 > (values - returns) ** 2)
