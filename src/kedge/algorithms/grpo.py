"""GRPO and its variants: advantages relative to the other responses to the same prompt.

Shao et al. 2024 (arXiv:2402.03300); Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783); DAPO, Yu et al.
2025 (arXiv:2503.14476); CISPO, MiniMax 2025 (arXiv:2506.13585); GSPO, Zheng et al. 2025
(arXiv:2507.18071).
"""

from __future__ import annotations

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
    policy_metrics,
    policy_terms,
    reference_kl,
    shaped_rewards,
    uniform_rows,
)
from kedge.math.advantage import group_normalize
from kedge.math.kl import ESTIMATORS
from kedge.math.losses import Clip, weighted_policy_loss
from kedge.math.ratios import RatioLevel
from kedge.math.rewards import place_score
from kedge.records.errors import ConfigError
from kedge.records.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"]


def grpo(
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    use_bias_correction_kl: bool = False,
    loss_type: LossType = "dapo",
    scale_rewards: Literal["group", "batch", "none"] = "group",
    importance_sampling_level: Literal["token", "sequence"] = "token",
    response_length: int | None = None,
    credit: CreditLevel = "token",
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
        epsilon: clip range of the ratio below 1.
        epsilon_high: clip range of the ratio above 1; None: ``epsilon``.  With "cispo", the largest
            weight of a token; None: 5.
        delta: upper limit of the ratio for tokens with a negative advantage (two-sided clip); it
            must be above 1 + epsilon_high.
        beta: coefficient of the KL in the loss; the trainer's ``kl_coef`` is the coefficient of the
            KL in the reward (k1).
        kl_estimator: estimator of the KL in the loss: "k1", "k2", "k3" or "abs".
        use_bias_correction_kl: multiply the KL in the loss by the ratio (arXiv:2512.02556).
        loss_type: how the loss averages over tokens and responses; see the variants above.
        scale_rewards: divide advantages by the standard deviation of the group or of the batch, or
            by neither.
        importance_sampling_level: compute the ratio per "token", or per "sequence" as the geometric
            mean over a response (GSPO).
        response_length: maximum number of tokens in a response, which "dr_grpo" needs.
        credit: compare whole responses ("token": all tokens share the advantage), or turn by turn
            ("turn").

    Raises:
        ConfigError: inconsistent options.
    """
    check_loss_kl("kl_estimator", kl_estimator)
    high = epsilon if epsilon_high is None else epsilon_high
    if delta is not None and delta <= 1 + high:
        raise ConfigError(f"delta={delta} must be above 1 + epsilon_high = {1 + high:g}")
    if loss_type == "dr_grpo" and response_length is None:
        raise ConfigError(
            "loss_type='dr_grpo' needs response_length, the longest response in tokens"
        )
    longest = response_length or 1
    clip = Clip(epsilon, high, delta)
    top = 5.0 if epsilon_high is None else epsilon_high  # the upper bound in "cispo"
    level: RatioLevel = "token" if importance_sampling_level == "token" else "sequence_mean"

    def compare(e: AdvantageInputs, x: Tensor, group: Tensor, valid: Tensor, _: Tensor) -> Tensor:
        return group_normalize(x, group, valid, scale=scale_rewards, all_reduce=e.all_reduce)

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        mask = e.rollout.loss_mask
        kl = reference_kl(e, "k1")
        scores, dense = shaped_rewards(e)
        penalty = dense if kl is None else dense - kl_coef * kl
        totals = (scores + penalty.sum(1)).float()
        rewards = place_score(scores, mask) + penalty
        return AdvantageOutput(
            rewards=rewards.float(),
            advantages=group_advantages(e, totals, rewards, mask, partial(compare, e), credit),
            kl=kl,
            loss_mask=mask,
        )

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        x, share = mb.rows, mb.token_weight
        w = share
        if loss_type == "dr_grpo":
            w = mb.row_weight[:, None] * x.loss_mask / longest
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

    return Algorithm(
        name="grpo" if level == "token" else "gspo",
        compute_advantages=compute_advantages,
        loss=loss,
        weighting="row_then_token_mean" if loss_type == "grpo" else "token_mean",
        min_group=2,
        uniform=partial(uniform_rows, credit=credit),
    )
