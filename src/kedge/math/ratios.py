"""Probability ratios of tokens or responses from per-token log-ratios."""

from __future__ import annotations

from typing import Literal

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
