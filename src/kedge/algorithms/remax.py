"""ReMax: the baseline is the score of the greedy response to the same prompt.

Li et al. 2024 (arXiv:2310.10505).
"""

from __future__ import annotations

from kedge.algorithms.base import (
    AdvantageInputs,
    Algorithm,
    dense_rewards,
    policy_metrics,
    policy_terms,
    reference_kl,
)
from kedge.math.advantage import rewards_to_go
from kedge.math.losses import Clip
from kedge.math.rewards import place_score
from kedge.records.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require


def remax(*, cliprange: float = 0.2, kl_estimator: str = "k1") -> Algorithm:
    """ReMax: REINFORCE with a greedy baseline, at the cost of one more response per prompt.

        A_t = score - greedy score - kl_coef sum_{s >= t} KL_s
        L = 1 / B sum_i sum_t -min(rho_t A_t, clip(rho_t) A_t)

    Args:
        cliprange: clip range of the ratio, epsilon; it has no effect with one optimizer step per
            batch, as in the paper.
        kl_estimator: KL estimator: "k1", "k2", "k3", "abs" or "full" (see ``kedge.math.kl``).
    """

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        mask = e.rollout.loss_mask
        kl = reference_kl(e, kl_estimator)
        scores, valid = e.reward_output.scores, e.reward_output.valid
        gain = scores - require(e.reward_output.greedy_scores, "greedy")
        dense = dense_rewards(e.reward_output, mask) - (0.0 if kl is None else kl_coef * kl)
        to_go = rewards_to_go(dense.float(), mask, gamma=1.0)
        return AdvantageOutput(
            rewards=(place_score(scores.where(valid, 0.0), mask) + dense).float(),
            advantages=gain.where(valid, 0.0)[:, None] * mask + to_go,
            kl=kl,
        )

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        terms = policy_terms(new, mb, Clip(cliprange))
        policy = (mb.row_weight[:, None] * mb.rows.loss_mask * terms.loss).sum()
        metrics = policy_metrics(terms, policy, new, mb, mb.token_weight)
        return Loss(parts={"policy": policy}, metrics=metrics)

    return Algorithm(
        name="remax",
        compute_advantages=compute_advantages,
        loss=loss,
        needs_full_kl=kl_estimator == "full",
        needs_greedy=True,
    )
