"""Weights that average tokens into one loss.

A weighting is a tensor that sums to 1 over one *optimizer step*, over all ranks.  It is computed
before the step is split into micro-batches, so that the split cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

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
