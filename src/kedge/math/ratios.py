"""Probability ratios, and importance weights of samples from another distribution.

``mu`` is the distribution of the rollout engine, ``old`` the learner's before the iteration.  They
differ if the engine has other kernels or another precision, or if samples are stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RatioLevel = Literal["token", "sequence", "sequence_mean"]


def mean_over_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's real tokens, 0 for a row without any.  [B, R] -> [B]."""
    return (x * mask).sum(1) / mask.sum(1).clamp(min=1)


def ratios(log_ratio: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """The probability ratio by which each token is clipped and weighted.

        token           rho_t = p_t / q_t
        sequence        prod_t rho_t                        the response as one action
        sequence_mean   (prod_t rho_t)^(1 / length)         GSPO, arXiv:2507.18071

    A response-level ratio is repeated at each token and has the gradient of that token only
    (GSPO-token in that paper).  Summed over tokens with equal advantages this is the gradient of
    the response's ratio; it also supports advantages that differ per token.

    Args:
        log_ratio: float [B, R], 0 outside the mask.
        mask: bool [B, R].
        level: see above.

    Returns:
        float [B, R].
    """
    if level == "token":
        return log_ratio.exp()
    fixed = log_ratio.detach()
    whole = (fixed * mask).sum(1) if level == "sequence" else mean_over_tokens(fixed, mask)
    return whole.exp()[:, None] * (log_ratio - fixed).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How the importance weight old / mu of a token is bounded.

    Args:
        kind: "truncate" clamps weights to ``low .. high``; "mask" sets weights outside to 0;
            "ratio" has no weights: the loss takes the ratio to ``mu`` instead of ``old``.
        level: weight of the token, of the response (product over its tokens), or the geometric
            mean over its tokens.
        high: upper bound; about 2 for tokens, 5 for responses, 1.01 for the geometric mean.
        low: lower bound; 0 disables it.
    """

    kind: Literal["truncate", "mask", "ratio"] = "truncate"
    level: Literal["token", "sequence", "sequence_mean"] = "token"
    high: float = 2.0
    low: float = 0.0


def importance_weights(old: Tensor, mu: Tensor, mask: Tensor, bounds: Correction) -> Tensor:
    """Weight of each token, old / mu bounded according to ``bounds``; no gradient.

    Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; masked: Liu, Li et al. 2025, "When speed kills stability".

    Args:
        old: float [B, R], log-probabilities of the learner before the iteration.
        mu: float [B, R], log-probabilities of the rollout engine.
        mask: bool [B, R].
        bounds: the correction.

    Returns:
        float [B, R], 0 outside the mask.
    """
    log_weight = ((old - mu) * mask).detach()
    if bounds.level == "sequence":
        log_weight = log_weight.sum(1, keepdim=True).expand_as(old)
    elif bounds.level == "sequence_mean":
        log_weight = mean_over_tokens(log_weight, mask)[:, None].expand_as(old)
    weight = log_weight.exp()
    if bounds.kind == "truncate":
        return weight.clamp(min=bounds.low, max=bounds.high) * mask
    return torch.where((weight >= bounds.low) & (weight <= bounds.high), weight, 0.0) * mask
