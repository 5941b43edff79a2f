"""Helpers shared by several algorithms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs
from kedge.math.kl import per_token_kl
from kedge.math.losses import Clip
from kedge.math.masked import standardize
from kedge.types import MicroBatch, PolicyOutput

Bounds = float | Sequence[float] | None


def shaped_scores(e: AdvantageInputs, *, normalize: bool, clip: Bounds) -> Tensor:
    """Scores, optionally normalized over the valid rows of all ranks, then optionally clipped.

    Args:
        e: the batch.
        normalize: (score - mean) / (std + 1e-4).
        clip: bounds ``(low, high)``, or one number c, also as ``(c,)``, for ``(-c, c)``.

    Returns:
        float32 [B], 0 where not valid.
    """
    scores = torch.where(e.reward_output.valid, e.reward_output.scores, 0.0)
    if normalize:
        scores = standardize(scores, e.reward_output.valid, total=e.total)
    if clip is None:
        return scores
    bounds = [float(clip)] if isinstance(clip, int | float) else [*map(float, clip)]
    low, high = bounds if len(bounds) == 2 else (-bounds[0], bounds[0])
    return torch.where(e.reward_output.valid, scores.clamp(low, high), 0.0)


def dense_rewards(e: AdvantageInputs) -> Tensor:
    """Dense token rewards on trained tokens, 0 if there are none.  float32 [B, R]."""
    dense = e.reward_output.token_rewards
    return e.rollout.loss_mask * (0.0 if dense is None else dense)


def reference_kl(e: AdvantageInputs, estimator: str, *, reference: bool) -> Tensor | None:
    """KL per trained token; None without a reference.  float32 [B, R]."""
    return per_token_kl(e.model_outputs, estimator) * e.rollout.loss_mask if reference else None


def policy_metrics(
    new: PolicyOutput, mb: MicroBatch, weight: Tensor, log_ratio: Tensor, ratio: Tensor
) -> dict[str, Tensor]:
    """Metrics of a policy loss, with ``weight`` per token [b, R] or per response [b]."""
    return {
        "policy/approxkl_avg": (weight * 0.5 * log_ratio**2).sum(),
        "policy/entropy_avg": (mb.token_weight * new.entropy).sum(),
        "val/ratio": (weight * ratio).sum(),
    }


def clipped_sides(
    ratio: Tensor, advantages: Tensor, clip: Clip, weight: Tensor
) -> dict[str, Tensor]:
    """Fractions clipped below and above, with ``weight`` per token or response."""
    low = (ratio < 1 - clip.low) & (advantages < 0)
    high = (ratio > clip.top) & (advantages > 0)
    return {
        "clip_ratio/low_mean": (weight * low).sum(),
        "clip_ratio/high_mean": (weight * high).sum(),
    }
