"""REINFORCE++: no value model and no groups; advantages are normalized over the global batch.

Hu et al. 2025 (arXiv:2501.03262).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.algorithms.base import (
    AdvantageInputs,
    Algorithm,
    Bounds,
    check_loss_kl,
    policy_metrics,
    policy_terms,
    reference_kl,
    shaped_rewards,
    turn_numbers,
)
from kedge.math.advantage import gae, group_mean, rewards_to_go
from kedge.math.kl import ESTIMATORS
from kedge.math.losses import ClipRange, as_clip
from kedge.math.masked import whiten
from kedge.math.ratios import RatioLevel
from kedge.math.rewards import place_score
from kedge.math.turns import turn_groups, turn_returns, turn_starts
from kedge.records.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require


def reinforce_pp(
    *,
    cliprange: ClipRange = 0.2,
    gamma: float = 1.0,
    kl_estimator: str = "k1",
    ratio_level: RatioLevel = "token",
    baseline: bool = False,
    normalize_reward: bool = False,
    reward_clip_range: Bounds = None,
    normalize_advantage: bool = True,
    beta: float = 0.0,
    loss_kl_estimator: str = "k2",
) -> Algorithm:
    """REINFORCE++: reward-to-go including the KL of each token, whitened over all tokens.

        r_t = [t is last] score - kl_coef KL_t [- (b_k - b_{k+1}) at the end of turn k]
        A_t = whiten(sum_{s >= t} gamma^{s - t} r_s)
        L = sum_t w_t (-min(rho_t A_t, clip(rho_t) A_t) + beta KL_t)        w_t = 1 / tokens

    The baseline b_k is the mean, over the responses of the group that have a turn k, of the rewards
    from turn k on; a response without turns is one turn, and b_0 the mean score of its group.

    Args:
        cliprange: clip range of the ratio, epsilon; a pair sets the ranges below and above 1.
        gamma: discount factor per token.
        kl_estimator: KL estimator in the reward; only "k1" gives the right gradient there.
        ratio_level: clip the ratio per token, per response, or as its geometric mean over a
            response.
        baseline: subtract the group's mean score (REINFORCE++-baseline); the paper then moves the
            KL to the loss (``kl_coef`` 0, ``beta`` above 0).
        normalize_reward: scale scores to mean 0 and variance 1 over the batch, then clip them.
        reward_clip_range: range to which scores are clipped: ``(low, high)``, or c for ``(-c, c)``.
        normalize_advantage: whiten advantages over all tokens on all ranks.
        beta: coefficient of the KL in the loss.
        loss_kl_estimator: KL estimator in the loss: "k1", "k2" or "k3"; "k1" has no gradient on
            average.

    Raises:
        ValueError: an unknown estimator.
    """
    check_loss_kl("loss_kl_estimator", loss_kl_estimator)
    clip = as_clip(cliprange)

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        mask = e.rollout.loss_mask
        kl = reference_kl(e, kl_estimator)
        scores, dense = shaped_rewards(e, normalize=normalize_reward, clip=reward_clip_range)
        rewards = (place_score(scores, mask) + dense).float()
        if baseline:
            rewards = rewards + _turn_baselines(e, rewards)
        if kl is not None:
            rewards = rewards - kl_coef * kl
        advantages = rewards_to_go(rewards, mask, gamma=gamma)
        if normalize_advantage:
            advantages = whiten(advantages, e.trained, all_reduce=e.all_reduce)
        return AdvantageOutput(rewards=rewards, advantages=advantages, kl=kl)

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        terms, w = policy_terms(new, mb, clip, ratio_level), mb.token_weight
        policy = (w * terms.loss).sum()
        parts, metrics = {"policy": policy}, policy_metrics(terms, policy, new, mb, w)
        if beta:
            ref = require(mb.rows.ref_logprobs, "reference")
            kl = (w * ESTIMATORS[loss_kl_estimator](new.logprobs, ref)).sum()
            parts["kl"], metrics["loss/kl_avg"] = beta * kl, kl
        return Loss(parts=parts, metrics=metrics)

    return Algorithm(
        name="reinforce_pp_baseline" if baseline else "reinforce_pp",
        compute_advantages=compute_advantages,
        loss=loss,
        needs_full_kl=kl_estimator == "full",
        min_group=2 if baseline else 1,
    )


def _turn_baselines(e: AdvantageInputs, rewards: Tensor) -> Tensor:
    """b_{k+1} - b_k at the last token of each turn k, 0 elsewhere.  float32 [B, R]."""
    turn = turn_numbers(e.rollout)
    starts, ends = turn_starts(turn), turn_starts(turn.flip(1)).flip(1)
    groups = turn_groups(turn, e.rollout.prompts.group)
    present = torch.ones_like(groups, dtype=torch.bool)
    means = group_mean(turn_returns(rewards, turn)[starts], groups, present)
    zeros = torch.zeros_like(rewards)
    return gae(zeros, zeros.masked_scatter(ends, means), ends, gamma=1.0, lam=0.0)
