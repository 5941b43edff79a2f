"""GRPO and its variants: advantages relative to the other responses to the same prompt.

Shao et al. 2024 (arXiv:2402.03300); Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783); DAPO, Yu et al.
2025 (arXiv:2503.14476); CISPO, MiniMax 2025 (arXiv:2506.13585); GSPO, Zheng et al. 2025
(arXiv:2507.18071).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from kedge.algorithms.base import (
    AdvantageInputs,
    Algorithm,
    CreditLevel,
    check_loss_kl,
    group_advantages,
    longest_response,
    policy_metrics,
    policy_terms,
    reference_kl,
    shaped_rewards,
    uniform_rows,
)
from kedge.math.advantage import group_normalize, normalize_then_sum
from kedge.math.kl import ESTIMATORS
from kedge.math.losses import Clip, weighted_policy_loss
from kedge.math.ratios import RatioLevel
from kedge.math.rewards import overlong_penalty, place_score
from kedge.records.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require

Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"]


def grpo(  # noqa: PLR0913
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    use_bias_correction_kl: bool = False,
    loss_type: LossType = "dapo",
    scale_rewards: Literal["group", "batch", "none"] = "group",
    multi_objective_aggregation: Aggregation = "sum_then_normalize",
    reward_weights: Sequence[float] | None = None,
    importance_sampling_level: Literal["token", "sequence"] = "token",
    response_length: int | None = None,
    mask_truncated_completions: bool = False,
    drop_uniform_groups: bool = False,
    dynamic_sampling: int = 0,
    overlong_buffer: int = 0,
    credit: CreditLevel = "token",
    reference: bool = True,
) -> Algorithm:
    """GRPO: group-normalized scores, clipped ratios, KL in the loss.

        A_i = (x_i - mean_group x) / (std x + 1e-4)        x_i = score_i - kl_coef sum_t KL_{i,t}
        L = sum_{i,t} w_{i,t} (-min(rho_{i,t} A_i, clip(rho_{i,t}) A_i) + beta KL_{i,t})

    Weights w by ``loss_type``, over one optimizer step and all ranks: "grpo" 1 / (rows length_i),
    "dapo" 1 / tokens, "dr_grpo" 1 / (rows response_length).  "bnpo" equals "dapo": they differ
    only if the loss depends on the micro-batch size, which it does not here.  "cispo" has the
    weights of "dapo" and the loss -sg(min(rho, epsilon_high)) A log p instead of the clipped one.

    With ``credit="turn"`` x_{i,k} is the sum of rewards (KL penalty included) from turn k on, and
    mean and std are those of the responses of the group that have a turn k (GTPO, Ding et al.
    2025, arXiv:2511.14846).

    Args:
        epsilon: ratio clip below 1.
        epsilon_high: ratio clip above 1; None is ``epsilon``.  With "cispo" the largest weight;
            None is 5.
        delta: largest ratio of a token with negative advantage (two-sided clip), above
            1 + epsilon_high.
        beta: coefficient of the KL in the loss.  The trainer's ``kl_coef`` is that of the KL in the
            reward (k1).
        kl_estimator: estimator of the KL in the loss: "k1", "k2", "k3" or "abs".
        use_bias_correction_kl: multiply the KL in the loss by the ratio (arXiv:2512.02556).
        loss_type: see above.
        scale_rewards: divide by the standard deviation of the group, of the batch, or not at all.
        multi_objective_aggregation: "normalize_then_sum" is GDPO: every reward is normalized in its
            group before the weighted sum, which is normalized over the batch.  It compares rewards
            of whole responses, without penalties.
        reward_weights: weight of each reward in GDPO; None: 1.
        importance_sampling_level: "sequence" is GSPO: the geometric mean of a response's ratios.
        response_length: limit of a response in tokens, for "dr_grpo" and ``overlong_buffer``.
        mask_truncated_completions: responses truncated by the length limit count for baselines but
            are not trained on.
        drop_uniform_groups: exclude groups without a difference in what is compared (without KL)
            from the loss and its weights.
        dynamic_sampling: rounds in which such groups are replaced by other prompts (DAPO).
        overlong_buffer: tokens before ``response_length`` over which the score falls by up to 1.
        credit: compare responses ("token": all tokens share the advantage), or "turn" by turn.
        reference: whether there is a reference policy.

    Raises:
        ValueError: inconsistent options.
    """
    check_loss_kl(beta, "kl_estimator", kl_estimator, reference=reference)
    high = epsilon if epsilon_high is None else epsilon_high
    if delta is not None and delta <= 1 + high:
        raise ValueError(f"delta={delta} must be above 1 + epsilon_high = {1 + high:g}")
    longest = longest_response(
        response_length, overlong_buffer, "dr_grpo" if loss_type == "dr_grpo" else None
    )
    clip = Clip(epsilon, high, delta)
    top = 5.0 if epsilon_high is None else epsilon_high  # the upper bound in "cispo"
    uniform = partial(uniform_rows, credit=credit, longest=longest, overlong_buffer=overlong_buffer)
    level: RatioLevel = "token" if importance_sampling_level == "token" else "sequence_mean"

    def compare(e: AdvantageInputs, x: Tensor, group: Tensor, valid: Tensor, _: Tensor) -> Tensor:
        return group_normalize(x, group, valid, scale=scale_rewards, all_reduce=e.all_reduce)

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        mask = e.rollout.loss_mask
        kl = reference_kl(e, "k1", reference=reference)
        scores, dense = shaped_rewards(e)
        if overlong_buffer:
            scores = scores + overlong_penalty(mask.sum(1), longest=longest, buffer=overlong_buffer)
        penalty = dense if kl is None else dense - kl_coef * kl
        totals = (scores + penalty.sum(1)).float()
        rewards = place_score(scores, mask) + penalty
        trained = e.rollout.terminated | (not mask_truncated_completions)
        if drop_uniform_groups:
            trained &= ~uniform(e.rollout, e.reward_output)
        return AdvantageOutput(
            rewards=rewards.float(),
            advantages=group_advantages(e, totals, rewards, mask, partial(compare, e), credit),
            kl=kl,
            loss_mask=mask & trained[:, None],
        )

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        x, share = mb.rows, mb.token_weight
        w = mb.row_weight[:, None] * x.loss_mask / longest if loss_type == "dr_grpo" else share
        terms = policy_terms(new, mb, clip, level)
        ratio = terms.ratio
        if loss_type == "cispo":
            terms = replace(
                terms,
                loss=weighted_policy_loss(new.logprobs, ratio, x.advantages, top=top),
                clipped=(ratio > top) & (x.advantages > 0),
            )
        policy = (w * terms.loss).sum()
        sides = None if loss_type == "cispo" else clip
        metrics = policy_metrics(terms, policy, new, mb, share, sides=sides)
        parts = {"policy": policy}
        if beta:
            kl = ESTIMATORS[kl_estimator](new.logprobs, require(x.ref_logprobs, "reference"))
            kl = (w * (kl * ratio if use_bias_correction_kl else kl)).sum()
            parts["kl"], metrics["loss/kl_avg"] = beta * kl, kl
        return Loss(parts=parts, metrics=metrics)

    algorithm = Algorithm(
        name="grpo" if level == "token" else "gspo",
        compute_advantages=compute_advantages,
        loss=loss,
        needs_reference=reference,
        weighting="row_then_token_mean" if loss_type == "grpo" else "token_mean",
        min_group=2,
        resample=dynamic_sampling,
        uniform=uniform,
    )
    decoupled = multi_objective_aggregation == "normalize_then_sum"
    return decouple_rewards(algorithm, reward_weights) if decoupled else algorithm


def decouple_rewards(algorithm: Algorithm, weights: Sequence[float] | None = None) -> Algorithm:
    """The algorithm with the advantages of ``kedge.math.advantage.normalize_then_sum`` (GDPO)."""

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        parts = e.reward_output.components
        rewards, split = [*parts.values()], [name for name in parts if "/" in name]
        if split or len(rewards) != len(weights or rewards):
            raise ValueError(
                "multi_objective_aggregation='normalize_then_sum' needs one score per reward, got"
                f" {', '.join(parts)}; pass the parts of a reward as rewards of their own"
            )
        advantages = normalize_then_sum(
            rewards,
            [1.0] * len(rewards) if weights is None else weights,
            e.rollout.prompts.group,
            e.reward_output.valid,
            all_reduce=e.all_reduce,
        )
        output = algorithm.compute_advantages(e, kl_coef)
        return replace(output, advantages=advantages[:, None] * e.rollout.loss_mask)

    return replace(algorithm, compute_advantages=compute_advantages)
