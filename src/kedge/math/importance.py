"""Corrections for samples drawn from another distribution than the one training starts from.

``mu`` is the sampler's distribution, ``old`` the anchor of the ratio: the learner's own before the
update.  They differ when another engine or precision samples, or when samples are stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kedge.math.ratios import mean_over_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How the weight old / mu of a token is bounded.

    Args:
        kind: "truncate" moves weights outside ``low .. high`` to the nearer bound; "mask" gives
            those tokens weight 0.
        level: the weight is that of the token, of the response (product over its tokens), or the
            geometric mean over its tokens.
        high: about 2 for tokens, 5 for responses, 1.01 for the geometric mean.
        low: 0 is no bound.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    level: Literal["token", "sequence", "sequence_mean"] = "token"
    high: float = 2.0
    low: float = 0.0


def importance_weights(old: Tensor, mu: Tensor, mask: Tensor, how: Correction) -> Tensor:
    """Weight of each token, w = old / mu bounded as ``how`` says; no gradient.

    Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; masked: Liu, Li et al. 2025, "When speed kills stability".

    Args:
        old: float [B, R], log-probabilities of the learner before the update.
        mu: float [B, R], log-probabilities of the sampler.
        mask: bool [B, R].
        how: the bounds.

    Returns:
        float [B, R], 0 off the mask.
    """
    log_weight = ((old - mu) * mask).detach()
    if how.level == "sequence":
        log_weight = log_weight.sum(1, keepdim=True).expand_as(old)
    elif how.level == "sequence_mean":
        log_weight = mean_over_tokens(log_weight, mask)[:, None].expand_as(old)
    weight = log_weight.exp()
    if how.kind == "truncate":
        return weight.clamp(min=how.low, max=how.high) * mask
    return torch.where((weight >= how.low) & (weight <= how.high), weight, 0.0) * mask
