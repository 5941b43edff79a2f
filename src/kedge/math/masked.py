"""Masked reductions over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]  # sum of a tensor over ranks


def one_rank(x: Tensor) -> Tensor:
    """Sum over all ranks, for a single rank."""
    return x


def masked_mean(x: Tensor, mask: Tensor, *, all_reduce: AllReduce = one_rank) -> Tensor:
    """Mean of ``x`` where ``mask``; 0 when the mask is empty everywhere.

    Args:
        x: float [*].
        mask: bool [*].
        all_reduce: sums a tensor over ranks; the default is for a single rank.
    """
    sums = all_reduce(torch.stack([torch.where(mask, x, 0.0).sum(), mask.sum().to(x.dtype)]))
    return sums[0] / sums[1].clamp(min=1)


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    center: bool = True,
    all_reduce: AllReduce = one_rank,
    eps: float = 1e-8,
    least: float = 0.0,
) -> Tensor:
    """Scale ``x`` to unit variance over the real tokens of all ranks; ``center`` removes the mean.

        (x - mean) / sqrt(max(var, least^2) + eps)  [+ mean]    var = sum (x - mean)^2 / (n - 1)

    The variance is the unbiased one, as in TRL; arXiv:2403.17031 divides by n.  A single real
    token becomes 0 (or its mean).

    Args:
        x: float [*].
        mask: bool [*]; the result is 0 outside it.
        center: whether the mean is removed; False is reward whitening.
        all_reduce: sums a tensor over ranks.
        eps: added to the variance.
        least: smallest standard deviation to divide by.
    """
    mean, variance = _mean_and_variance(x, mask, all_reduce)
    centered = torch.where(mask, x - mean, 0.0)
    scaled = centered * (variance.clamp(min=least**2) + eps).rsqrt()
    return scaled if center else torch.where(mask, scaled + mean, 0.0)


def moments(x: Tensor, mask: Tensor, *, all_reduce: AllReduce = one_rank) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of ``x`` where ``mask``, over all ranks; scalars.

    The deviation of fewer than two values is 0.

    Args:
        x: float [*].
        mask: bool [*].
        all_reduce: sums a tensor over ranks.
    """
    mean, variance = _mean_and_variance(x, mask, all_reduce)
    return mean, variance.sqrt()


def _mean_and_variance(x: Tensor, mask: Tensor, all_reduce: AllReduce) -> tuple[Tensor, Tensor]:
    mean = masked_mean(x, mask, all_reduce=all_reduce)
    centered = torch.where(mask, x - mean, 0.0)
    sums = all_reduce(torch.stack([(centered**2).sum(), mask.sum().to(x.dtype)]))
    return mean, sums[0] / (sums[1] - 1).clamp(min=1)


def standardize(
    x: Tensor, mask: Tensor, *, all_reduce: AllReduce = one_rank, eps: float = 1e-4
) -> Tensor:
    """(x - mean) / (std + eps) over all ranks; 0 outside the mask.

    ``eps`` is larger and outside the root, so that rounding of equal scores is not amplified.

    Args:
        x: float [*].
        mask: bool [*].
        all_reduce: sums a tensor over ranks.
        eps: added to the standard deviation.
    """
    mean, std = moments(x, mask, all_reduce=all_reduce)
    return torch.where(mask, (x - mean) / (std + eps), 0.0)


def last_true(mask: Tensor) -> Tensor:
    """Index int64 [B] of the last True of each row of bool [B, R]; -1 for a row without one."""
    slots = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, slots, -1).max(dim=1).values if mask.shape[1] else mask.sum(1) - 1


def extend(mask: Tensor) -> Tensor:
    """``mask`` with one more True after the last one of each row, if there is room.

    A row without a True stays empty.  bool [B, R] -> bool [B, R].
    """
    slots = torch.arange(mask.shape[1], device=mask.device)
    last = last_true(mask)[:, None]
    return mask | ((slots == last + 1) & (last >= 0))
