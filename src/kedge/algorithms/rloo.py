"""REINFORCE with a leave-one-out baseline: several responses per prompt, no value model.

Ahmadian et al. 2024, "Back to Basics" (arXiv:2402.14740); the options for normalizing rewards
and advantages and for a per-token KL are from REINFORCE++ (arXiv:2501.03262).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from kedge.algorithms.base import (
    AdvantageInputs,
    Algorithm,
    Bounds,
    CreditLevel,
    group_advantages,
    policy_metrics,
    policy_terms,
    reference_kl,
    shaped_rewards,
    uniform_rows,
)
from kedge.math.advantage import group_count, leave_one_out, rewards_to_go
from kedge.math.losses import ClipRange, as_clip
from kedge.math.masked import standardize, whiten
from kedge.math.rewards import place_score
from kedge.records.errors import ConfigError
from kedge.records.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput


def rloo(
    *,
    cliprange: ClipRange = 0.2,
    kl_estimator: str = "k1",
    ratio_level: Literal["sequence", "token"] | None = None,
    token_level_kl: bool = False,
    normalize_reward: bool = False,
    reward_clip_range: Bounds = None,
    normalize_advantage: bool = False,
    credit: CreditLevel = "token",
) -> Algorithm:
    """RLOO: the baseline of a response is the mean of the other responses to its prompt.

        x_i = score_i - kl_coef sum_t KL_{i,t}       A_i = x_i - 1 / (k - 1) sum_{j != i} x_j
        L = 1 / B sum_i -min(rho_i A_i, clip(rho_i) A_i)        rho_i = prod_t rho_{i,t}

    With ``token_level_kl`` x_i is the score alone, and A_{i,t} = A_i - kl_coef sum_{s >= t} KL_s.
    With token ratios L = 1 / B sum_i sum_t of the per-token terms, which has the same gradient
    while the ratio is 1.  Responses without a valid score are excluded from baselines; a
    response left alone in its group has advantage 0.

    With ``credit="turn"`` x_{i,k} is the sum of rewards (KL penalty included) from turn k on, and
    its baseline the mean over the other responses of the group that have a turn k (GTPO, Ding et
    al. 2025, arXiv:2511.14846).

    Args:
        cliprange: clip range of the ratio, epsilon; a pair sets the ranges below and above 1.
        kl_estimator: KL estimator: "k1", "k2", "k3", "abs" or "full" (see ``kedge.math.kl``).
        ratio_level: clip the ratio per "sequence" or per "token"; None: "sequence", or "token" with
            ``token_level_kl``.
        token_level_kl: penalize each token for its own KL and that of later tokens, not for the KL
            of the whole response.
        normalize_reward: scale scores to mean 0 and variance 1 over the batch, then clip them.
        reward_clip_range: range to which scores are clipped: ``(low, high)``, or c for ``(-c, c)``.
        normalize_advantage: normalize advantages to mean 0 and standard deviation 1 over the batch.
        credit: compare whole responses ("token": all tokens share the advantage), or turn by turn
            ("turn").

    Raises:
        ConfigError: ``ratio_level="sequence"`` with ``token_level_kl`` or ``credit="turn"``, or
            both of these.
    """
    _check_levels(ratio_level, token_level_kl, credit)
    by_token = token_level_kl or ratio_level == "token" or credit == "turn"
    clip = as_clip(cliprange)

    def compare(
        e: AdvantageInputs, scores: Tensor, group: Tensor, valid: Tensor, trained: Tensor
    ) -> Tensor:
        centered = leave_one_out(scores, group, valid)
        if not normalize_advantage:
            return centered
        compared = valid & trained & (group_count(group, valid) > 1)
        return standardize(centered, compared, all_reduce=e.all_reduce)

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        mask, group, valid = e.rollout.loss_mask, e.rollout.prompts.group, e.reward_output.valid
        kl = reference_kl(e, kl_estimator)
        scores, dense = shaped_rewards(e, normalize=normalize_reward, clip=reward_clip_range)
        penalty = dense if kl is None else dense - kl_coef * kl
        rewards = place_score(scores, mask) + penalty
        if token_level_kl:
            centered = leave_one_out(scores, group, valid)
            advantages = centered[:, None] * mask + rewards_to_go(penalty.float(), mask, gamma=1.0)
            if normalize_advantage:
                advantages = whiten(advantages, e.trained, all_reduce=e.all_reduce)
        else:
            totals = (scores + penalty.sum(1)).float()
            advantages = group_advantages(
                e, totals, rewards, e.trained, partial(compare, e), credit
            )
        return AdvantageOutput(rewards=rewards.float(), advantages=advantages, kl=kl)

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        x, share = mb.rows, mb.token_weight
        terms = policy_terms(new, mb, clip, "token" if by_token else "sequence")
        weight = mb.row_weight[:, None] * x.loss_mask
        policy = (weight * terms.loss).sum()
        if not by_token:
            # The gradient is that of the sum over tokens, the value is that of the response.
            share = weight / x.loss_mask.sum(1, keepdim=True).clamp(min=1)
            policy = policy + ((share * terms.loss).sum() - policy).detach()
            per_response = terms.log_ratio.sum(1, keepdim=True) * x.loss_mask
            terms = replace(terms, log_ratio=per_response)
        metrics = policy_metrics(terms, policy, new, mb, share, sides=clip)
        return Loss(parts={"policy": policy}, metrics=metrics)

    return Algorithm(
        name="rloo",
        compute_advantages=compute_advantages,
        loss=loss,
        needs_full_kl=kl_estimator == "full",
        min_group=2,
        uniform=partial(uniform_rows, credit=credit),
    )


def _check_levels(ratio_level: str | None, token_level_kl: bool, credit: CreditLevel) -> None:
    if ratio_level == "sequence" and (token_level_kl or credit == "turn"):
        option = "token_level_kl=True" if token_level_kl else "credit='turn'"
        raise ConfigError(
            f"{option} gives each token a separate advantage, but ratio_level='sequence'"
            " needs one per response; use ratio_level='token'"
        )
    if token_level_kl and credit == "turn":
        raise ConfigError("credit='turn' charges each turn with its KL; set token_level_kl=False")
