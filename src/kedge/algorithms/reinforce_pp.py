"""REINFORCE++: no value model and no groups; advantages are normalized over the global batch.

Hu et al. 2025 (arXiv:2501.03262).
"""

from __future__ import annotations

from kedge.algorithms.base import AdvantageInputs, Algorithm
from kedge.algorithms.common import (
    Bounds,
    dense_rewards,
    policy_metrics,
    reference_kl,
    shaped_scores,
)
from kedge.math.advantage import group_mean, rewards_to_go
from kedge.math.kl import ESTIMATORS
from kedge.math.losses import Clip, clipped_policy_loss, policy_is_clipped
from kedge.math.masked import whiten
from kedge.math.ratios import RatioLevel, ratios
from kedge.math.rewards import place_score
from kedge.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require


def reinforce_pp(
    *,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    gamma: float = 1.0,
    kl_estimator: str = "k1",
    ratio_level: RatioLevel = "token",
    baseline: bool = False,
    normalize_reward: bool = False,
    reward_clip_range: Bounds = None,
    normalize_advantage: bool = True,
    beta: float = 0.0,
    loss_kl_estimator: str = "k2",
    reference: bool = True,
) -> Algorithm:
    """REINFORCE++: reward-to-go including the KL of each token, whitened over all tokens.

        r_t = [t is last] (score [- mean score of its group]) - kl_coef KL_t
        A_t = whiten(sum_{s >= t} gamma^{s - t} r_s)
        L = sum_t w_t (-min(rho_t A_t, clip(rho_t) A_t) + beta KL_t)        w_t = 1 / tokens

    Args:
        cliprange: ratio clip, epsilon.
        cliprange_high: epsilon above 1; None is ``cliprange``.
        gamma: discount per token.
        kl_estimator: estimator of the KL in the reward; only "k1" has the right gradient there.
        ratio_level: clip the ratio of tokens, of responses, or its geometric mean over tokens.
        baseline: subtract the group's mean score (REINFORCE++-baseline); the paper then puts the
            KL into the loss (``kl_coef`` 0, ``beta`` above 0).
        normalize_reward: normalize scores over the batch (mean 0, deviation 1) before clipping.
        reward_clip_range: clip range of the scores: ``(low, high)``, or c for ``(-c, c)``.
        normalize_advantage: whiten advantages over all tokens of all ranks.
        beta: coefficient of the KL in the loss.
        loss_kl_estimator: "k1", "k2" or "k3"; k1 has no gradient on average.
        reference: whether there is a reference policy for the KL penalty.

    Raises:
        ValueError: ``beta`` without a reference, or an unknown estimator.
    """
    if beta and not reference:
        raise ValueError(f"beta={beta} needs a reference policy, got reference=False; set beta=0")
    if loss_kl_estimator not in ESTIMATORS:
        raise ValueError(
            f"loss_kl_estimator must be one of {', '.join(ESTIMATORS)}, got {loss_kl_estimator!r}"
        )

    clip = Clip(cliprange, cliprange_high)

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        mask = e.rollout.loss_mask
        kl = reference_kl(e, kl_estimator, reference=reference)
        scores = shaped_scores(e, normalize=normalize_reward, clip=reward_clip_range)
        if baseline:
            scores = scores - group_mean(scores, e.rollout.prompts.group, e.reward_output.valid)
        rewards = place_score(scores, mask) + dense_rewards(e)
        if kl is not None:
            rewards = rewards - kl_coef * kl
        advantages = rewards_to_go(rewards, mask, gamma=gamma)
        if normalize_advantage:
            advantages = whiten(advantages, mask, total=e.total)
        return AdvantageOutput(rewards=rewards, advantages=advantages, kl=kl)

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        x, w = mb.rows, mb.token_weight
        log_ratio = (new.logprobs - x.old_logprobs) * x.loss_mask
        ratio = ratios(log_ratio, x.loss_mask, ratio_level)
        per_token = clipped_policy_loss(ratio, x.advantages, clip=clip)
        clipped = policy_is_clipped(ratio, x.advantages, clip=clip)
        policy = (w * per_token).sum()
        parts = {"policy": policy}
        metrics = policy_metrics(new, mb, w, log_ratio, ratio) | {
            "loss/policy_avg": policy,
            "policy/clipfrac_avg": (w * clipped).sum(),
        }
        if beta:
            ref = require(x.ref_logprobs, "reference")
            kl = (w * ESTIMATORS[loss_kl_estimator](new.logprobs, ref)).sum()
            parts["kl"], metrics["loss/kl_avg"] = beta * kl, kl
        return Loss(parts=parts, metrics=metrics)

    return Algorithm(
        name="reinforce_pp_baseline" if baseline else "reinforce_pp",
        compute_advantages=compute_advantages,
        loss=loss,
        needs_reference=reference,
        needs_full_kl=reference and kl_estimator == "full",
        min_group=2 if baseline else 1,
    )
