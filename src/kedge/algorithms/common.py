"""Helpers shared by several algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs
from kedge.math.kl import per_token_kl
from kedge.math.losses import Clip
from kedge.math.masked import standardize
from kedge.math.turns import (
    number_turns,
    spread_over_turns,
    turn_groups,
    turn_returns,
    turn_starts,
)
from kedge.types import MicroBatch, PolicyOutput

Bounds = float | Sequence[float] | None
CreditLevel = Literal["token", "turn"]
Compare = Callable[[Tensor, Tensor, Tensor], Tensor]  # scores, group, valid -> advantages, all [n]


def turn_numbers(e: AdvantageInputs) -> Tensor:
    """The turn of each trained token: that of the episodes, or runs of the loss mask."""
    mask, episodes = e.rollout.loss_mask, e.rollout.episodes
    return number_turns(mask) if episodes is None else torch.where(mask, episodes.turn, -1)


def group_advantages(
    e: AdvantageInputs, whole: Tensor, rewards: Tensor, compare: Compare, credit: CreditLevel
) -> Tensor:
    """Advantages by comparing the responses to a prompt, as a whole or turn by turn.

        "token":  A_i     = compare(whole_i among the rows of the group)
        "turn":   A_{i,k} = compare(G_{i,k} among the rows of the group that have a turn k)

    G is the sum of the rewards of turn k and all later ones (GTPO, Ding et al. 2025,
    arXiv:2511.14846).  All tokens of a response or turn share the advantage.

    Args:
        e: the batch.
        whole: float32 [B]; reward of each response.
        rewards: float32 [B, R]; the same per token.
        compare: the group baseline.
        credit: see above.

    Returns:
        float32 [B, R], 0 outside the mask.
    """
    mask, group = e.rollout.loss_mask, e.rollout.prompts.group
    if credit == "token":
        return compare(whole, group, e.reward_output.valid)[:, None] * mask
    turn = turn_numbers(e)
    starts, returns = turn_starts(turn), turn_returns(rewards, turn)
    groups = turn_groups(turn, group)
    compared = compare(returns[starts], groups, torch.ones_like(groups, dtype=torch.bool))
    at_starts = torch.zeros_like(returns).masked_scatter(starts, compared.to(returns.dtype))
    return spread_over_turns(at_starts, turn)


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
