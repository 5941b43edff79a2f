"""Advantages from rewards: pure functions, each with its formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kedge.math.masked import AllReduce, moments, standardize


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    after: Tensor | None = None,
) -> Tensor:
    """Generalized advantage estimation, one trajectory per row.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    V after the last real token is ``after``, by default 0 (the episode has ended).  Tokens
    outside the mask (tool output) have no advantage and are skipped.
    Schulman et al. 2016, eq. 16 (arXiv:1506.02438).

    Args:
        rewards: float32 [B, R].
        values: float32 [B, R]; V of the state before token t.
        mask: bool [B, R].
        gamma: discount per token.
        lam: lambda, a number or float32 [B].
        after: float32 [B]; V of the state after the last token, for truncated responses.

    Returns:
        float32 [B, R], 0 outside the mask.
    """
    next_value = torch.zeros_like(values[:, 0]) if after is None else after
    advantage = torch.zeros_like(next_value)
    out = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        real = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(real, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(real, values[:, t], next_value)
        out[:, t] = torch.where(real, advantage, 0.0)
    return out


def rewards_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of this and all later rewards of the row: G_t = r_t + gamma G_{t+1}.

    Args:
        rewards: float32 [B, R].
        mask: bool [B, R]; tokens outside it are skipped.
        gamma: discount per token.

    Returns:
        float32 [B, R], 0 outside the mask.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)


def length_adaptive_lambda(mask: Tensor, *, alpha: float) -> Tensor:
    """GAE's lambda by response length l: lambda = 1 - 1 / (alpha l), at least 0.

    VAPO, arXiv:2504.05118.  bool [B, R] -> float32 [B].
    """
    return (1 - 1 / (alpha * mask.sum(1).clamp(min=1))).clamp(min=0)


def _group_sums(x: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` in float64, 0 where not valid; each row's sum and count over its group's valid rows."""
    _, index = group.unique(return_inverse=True)
    kept = torch.where(valid, x, 0.0).double()
    sums = torch.zeros_like(kept).index_add_(0, index, kept)
    counts = torch.zeros_like(kept).index_add_(0, index, valid.double())
    return kept, sums[index], counts[index]


def group_count(group: Tensor, valid: Tensor) -> Tensor:
    """Valid rows in each row's group.  int64 [B], bool [B] -> float64 [B]."""
    return _group_sums(valid.double(), group, valid)[2]


def group_mean(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Mean score of the valid rows of each row's group; 0 for a group without valid rows.

    Args:
        scores: float32 [B].
        group: int64 [B]; rows with equal values form a group, in any order.
        valid: bool [B].

    Returns:
        float32 [B].
    """
    _, sums, counts = _group_sums(scores, group, valid)
    return (sums / counts.clamp(min=1)).to(scores.dtype)


def group_std(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Unbiased standard deviation over the valid rows of each row's group; 0 for fewer than two.

    It is also 0 if the scores only differ in their last two bits: sums of rewards that should be
    equal may do so, and dividing would turn rounding errors into advantages.

    Args, Returns: as for ``group_mean``.
    """
    kept, sums, counts = _group_sums(scores, group, valid)
    _, squares, _ = _group_sums((kept - sums / counts.clamp(min=1)) ** 2, group, valid)
    _, powers, _ = _group_sums(kept**2, group, valid)
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    size = (powers / counts.clamp(min=1)).sqrt()  # root mean square of the scores
    rounding = 2 * torch.finfo(scores.dtype).eps * size
    return torch.where(std > rounding, std, 0.0).to(scores.dtype)


def leave_one_out(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Score minus the mean score of the other valid rows of the group.

        A_i = r_i - 1 / (k - 1) sum_{j != i} r_j

    It is 0 for a row that is not valid or is alone in its group.  Ahmadian et al. 2024
    (arXiv:2402.14740).

    Args, Returns: as for ``group_mean``.
    """
    kept, sums, counts = _group_sums(scores, group, valid)
    centered = kept - (sums - kept) / (counts - 1).clamp(min=1)
    return torch.where(valid & (counts > 1), centered, 0.0).to(scores.dtype)


def group_normalize(
    scores: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    scale: Literal["group", "batch", "none"],
    all_reduce: AllReduce,
    eps: float = 1e-4,
) -> Tensor:
    """Score minus its group's mean, divided by a standard deviation.

        A_i = (r_i - mean_group) / (std + eps)

    A group with one valid row has advantage 0.  Shao et al. 2024 (arXiv:2402.03300) for "group";
    Liu et al. 2025 (arXiv:2503.20783) for "none"; "batch" is arXiv:2508.08221.

    Args:
        scores: float32 [B].
        group: int64 [B].
        valid: bool [B].
        scale: divide by the standard deviation of the group, of all valid scores, or not at all.
        all_reduce: sums a tensor over ranks, for "batch".
        eps: added to the standard deviation.

    Returns:
        float32 [B], 0 where not valid.
    """
    kept, sums, counts = _group_sums(scores, group, valid)
    centered = torch.where(valid, kept - sums / counts.clamp(min=1), 0.0).to(scores.dtype)
    if scale == "group":
        std = group_std(scores, group, valid)
        return torch.where(std > 0, centered / (std + eps), 0.0)
    if scale == "batch":
        _, std = moments(scores, valid, all_reduce=all_reduce)
        return centered / (std + eps)
    return centered


def normalize_then_sum(
    rewards: Sequence[Tensor],
    weights: Sequence[float],
    group: Tensor,
    valid: Tensor,
    *,
    all_reduce: AllReduce,
    eps: float = 1e-4,
) -> Tensor:
    """Several rewards, each normalized in its group, summed, and normalized over the batch.

        z_i = sum_k w_k (r_{k,i} - mean_group r_k) / (std_group r_k + eps)
        A_i = (z_i - mean z) / (std z + eps)

    GDPO, Liu et al. 2026 (arXiv:2601.05242).

    Args:
        rewards: float32 [B] for each of K rewards, NaN where one does not apply.
        weights: K numbers.
        group: int64 [B].
        valid: bool [B].
        all_reduce: sums a tensor over ranks.
        eps: added to the standard deviations.

    Returns:
        float32 [B], 0 where not valid.
    """
    total = torch.zeros_like(group, dtype=torch.float32)
    for reward, weight in zip(rewards, weights, strict=True):
        applies = valid & ~reward.isnan()
        z = group_normalize(reward, group, applies, scale="group", all_reduce=all_reduce, eps=eps)
        total = total + weight * z
    return standardize(total, valid, all_reduce=all_reduce, eps=eps)
