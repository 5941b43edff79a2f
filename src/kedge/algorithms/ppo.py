"""PPO with a learned value baseline.

Schulman et al. 2017 (arXiv:1707.06347); for language models Ziegler et al. 2019
(arXiv:1909.08593) and Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO"
(arXiv:2403.17031).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kedge.algorithms.base import (
    AdvantageInputs,
    Algorithm,
    CreditLevel,
    dense_rewards,
    longest_response,
    policy_metrics,
    policy_terms,
    reference_kl,
    trained_turns,
    turn_numbers,
    uniform_rows,
)
from kedge.math.advantage import gae, group_count, length_adaptive_lambda
from kedge.math.losses import (
    Clip,
    clip_cov_tokens,
    clipped_value_loss,
    covariances,
    kl_cov_tokens,
    value_is_clipped,
)
from kedge.math.masked import extend, gather_values, last_true, moments, whiten
from kedge.math.rewards import move_last, overlong_penalty, place_score
from kedge.math.turns import broadcast_turns, segment_sum, turn_starts
from kedge.records.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require

ScorePosition = Literal["last", "after_last"]


def ppo(  # noqa: C901, PLR0913, PLR0915
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    policy_loss: Literal["clip", "mask"] = "clip",
    loss_aggregation: Literal["token", "sequence", "constant"] = "token",
    response_length: int | None = None,
    cliprange_value: float = 0.2,
    vf_coef: float = 0.1,
    kl_estimator: str = "k1",
    whiten_rewards: bool = False,
    whiten_advantages: bool | Literal["batch"] = True,
    score_position: ScorePosition = "last",
    bootstrap_truncated: bool = False,
    lam_value: float | None = None,
    lam_alpha: float | None = None,
    dual_clip: float | None = None,
    credit: CreditLevel = "token",
    kl_cov: float = 0.0,
    kl_cov_coef: float = 1.0,
    clip_cov: float = 0.0,
    mask_truncated_completions: bool = False,
    drop_uniform_groups: bool = False,
    dynamic_sampling: int = 0,
    overlong_buffer: int = 0,
    reference: bool = True,
) -> Algorithm:
    """PPO: GAE on KL-penalized rewards, clipped policy and value losses.

        r_t = -kl_coef KL_t + [t has the score] score      A = scale(GAE(r, V))
        L = sum_t w_t (-min(rho_t A_t, clip(rho_t) A_t)) + vf_coef sum_t v_t L_value,t

    scale(x) = (x - mean x) / max(std x, 1).  Whitening would also scale up; where all responses
    succeed, x is the error of the value model, and the policy would unlearn what it has solved.

    With ``credit="turn"`` a turn of an episode is one action: its reward is the sum over its
    tokens, V is that of the state before its first token (the only one the value model is trained
    on), GAE steps from turn to turn, and all tokens of the turn share the advantage.  Advantages
    are scaled over turns (Turn-PPO, Li et al. 2025, arXiv:2512.17008).

    Args:
        gamma: discount per token, or per turn.
        lam: GAE's lambda.
        cliprange: ratio clip, epsilon in eq. 7 of arXiv:1707.06347.
        cliprange_high: the clip above 1, if it differs (clip-higher, DAPO, with 0.28).
        policy_loss: "mask" gives no gradient to tokens whose ratio is outside of both clips,
            whatever the sign of the advantage (SAO, arXiv:2607.07508, with 0.3 and 5).  They stay
            in the denominator of the mean.
        loss_aggregation: weights of tokens over one optimizer step and all ranks: "token"
            1 / tokens, "sequence" 1 / (rows length); "constant" 1 / (rows response_length), in the
            policy loss alone.
        response_length: limit of a response in tokens, for "constant" and ``overlong_buffer``.
        cliprange_value: clip of the value around its old prediction.
        vf_coef: coefficient of the value loss.
        kl_estimator: "k1", "k2", "k3", "abs" or "full", see ``kedge.math.kl``.
        whiten_rewards: scale rewards to unit variance, keeping their mean.
        whiten_advantages: scale advantages, as above; "batch": always to unit variance, as TRL.
        score_position: "last" puts the score on the last real token; "after_last" one slot later
            where there is room, with what per-token rewards and environments give to the last
            token, and scales by "batch", as TRL and arXiv:2403.17031 do.
        bootstrap_truncated: bootstrap truncated responses from the value after their last token;
            with ``credit="turn"`` those that end with an observation.
        lam_value: GAE's lambda of the value targets; None: ``lam``, or 1 with ``lam_alpha``, as in
            VAPO.  With 1 they are unbiased, which helps long responses (VC-PPO, arXiv:2503.01491).
        lam_alpha: use lambda 1 - 1 / (lam_alpha length) for advantages instead of ``lam``, with the
            length in tokens (VAPO, arXiv:2504.05118, with 0.05).
        dual_clip: largest ratio of a token with negative advantage (arXiv:1912.09729, with 3).
        credit: what an action is: "token", or "turn" for tasks of many turns.
        kl_cov: this share of the tokens, those whose log-probability and advantage covary most,
            gets the penalty ``kl_cov_coef`` times abs(log rho) (KL-Cov, arXiv:2505.22617, with
            0.002 and without a clip).  It acts from the second optimizer step of a batch on.
        kl_cov_coef: see above.
        clip_cov: this share of the tokens, of those with a covariance from 1 to 5, gets no policy
            gradient (Clip-Cov, arXiv:2505.22617, with 2e-4).
        mask_truncated_completions: responses truncated by the length limit are not trained on.
        drop_uniform_groups: groups of equal scores, overlong penalty included, or of equal rewards
            from each turn on (``credit="turn"``), train the value model alone.
        dynamic_sampling: rounds in which such groups are replaced by other prompts (DAPO).
        overlong_buffer: tokens before ``response_length`` over which the score falls by up to 1.
        reference: whether there is a reference policy for the KL penalty.

    Raises:
        ValueError: ``credit="turn"`` with ``score_position="after_last"`` or ``lam_alpha``, or
            a length limit that is missing.
    """
    if credit == "turn" and score_position == "after_last":
        raise ValueError(
            "credit='turn' needs every reward on a token of its turn, but"
            " score_position='after_last' puts the score after the last one; use 'last'"
        )
    if credit == "turn" and lam_alpha:
        raise ValueError(
            f"lam_alpha={lam_alpha} counts tokens; lambda would be 0 up to {1 / lam_alpha:.3g}"
            " turns. With credit='turn' set lam instead"
        )
    needed_by = "loss_aggregation" if loss_aggregation == "constant" else None
    longest = longest_response(response_length, overlong_buffer, needed_by)
    by_batch = whiten_advantages == "batch" or score_position == "after_last"
    target_lam = (1.0 if lam_alpha else lam) if lam_value is None else lam_value
    clip = Clip(cliprange, cliprange_high, dual_clip)
    uniform = partial(uniform_rows, credit=credit, longest=longest, overlong_buffer=overlong_buffer)
    filters = mask_truncated_completions or drop_uniform_groups

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        mask, scores = e.rollout.loss_mask, e.reward_output.scores  # [B, R], [B]
        value_mask = extend(mask) if score_position == "after_last" else mask
        kl = reference_kl(e, kl_estimator, reference=reference)
        learned = improved = torch.ones_like(scores, dtype=torch.bool)  # for value, policy
        if mask_truncated_completions:
            learned = improved = e.rollout.terminated
        if drop_uniform_groups:
            several = group_count(e.rollout.prompts.group, e.reward_output.valid) > 1
            improved = learned & ~(uniform(e.rollout, e.reward_output) & several)
        if overlong_buffer:
            scores = scores + overlong_penalty(mask.sum(1), longest=longest, buffer=overlong_buffer)
        rewards = (place_score(scores, mask) + dense_rewards(e.reward_output, mask)).float()
        rewards = move_last(rewards, mask, value_mask)
        rewards = rewards if kl is None else rewards - kl_coef * kl
        turn, actions = turn_numbers(e.rollout) if credit == "turn" else None, mask
        if turn is not None:
            actions = value_mask = turn_starts(turn)
            rewards = segment_sum(rewards, turn) * actions
        if whiten_rewards:
            rewards = whiten(rewards, value_mask, center=False, all_reduce=e.all_reduce)
        values = require(e.model_outputs.values, "values")
        own_lam = lam if lam_alpha is None else length_adaptive_lambda(actions, alpha=lam_alpha)
        after = _values_after(e, credit) if bootstrap_truncated else None
        estimate = partial(gae, rewards, values, value_mask, gamma=gamma, after=after)
        raw = estimate(lam=own_lam)
        same = lam_alpha is None and target_lam == lam
        target = raw if same else estimate(lam=target_lam)
        returns = (target + values) * value_mask
        tokens = e.trained & improved[:, None]
        trained = tokens if turn is None else trained_turns(turn, tokens)
        scaled = whiten(raw, trained, all_reduce=e.all_reduce, least=0.0 if by_batch else 1.0)
        advantages = scaled if whiten_advantages else raw * actions
        if turn is not None:
            advantages = broadcast_turns(advantages, turn)
        penalized = None
        if kl_cov:
            penalized = _choose(e, advantages, tokens, partial(kl_cov_tokens, share=kl_cov))
        if clip_cov:
            clipped = _choose(e, advantages, tokens, partial(clip_cov_tokens, share=clip_cov))
            advantages = advantages * ~clipped
        return AdvantageOutput(
            rewards=rewards,
            advantages=advantages,
            returns=returns,
            kl=kl,
            value_mask=value_mask & learned[:, None],
            loss_mask=mask & improved[:, None] if filters else None,
            deviation=moments(raw, trained, all_reduce=e.all_reduce)[1],
            penalized=penalized,
        )

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        x, w, v = mb.rows, mb.token_weight, mb.value_weight
        terms = policy_terms(new, mb, clip, masked=policy_loss == "mask")
        constant = loss_aggregation == "constant"
        share = mb.row_weight[:, None] * x.loss_mask / longest if constant else w
        policy = (share * terms.loss).sum()
        values, old, returns = (require(y, "values") for y in (new.values, x.old_values, x.returns))
        value = (v * clipped_value_loss(values, old, returns, clip=cliprange_value)).sum()
        value_clipped = value_is_clipped(values, old, returns, clip=cliprange_value)
        parts = {"policy": policy, "value": vf_coef * value}
        metrics = policy_metrics(terms, policy, new, mb, w) | {
            "loss/value_avg": value,
            "policy/policykl_avg": -(w * terms.log_ratio).sum(),
            "val/clipfrac_avg": (v * value_clipped).sum(),
        }
        if kl_cov:
            change = terms.log_ratio.abs()  # abs would pass on the sign of a rounding error
            penalty = (w * require(x.penalized, "penalized") * change * (change > 1e-5)).sum()
            parts["kl_cov"], metrics["loss/kl_cov_avg"] = kl_cov_coef * penalty, penalty
        return Loss(parts=parts, metrics=metrics)

    return Algorithm(
        name="ppo",
        compute_advantages=compute_advantages,
        loss=loss,
        needs_values=True,
        needs_reference=reference,
        needs_full_kl=reference and kl_estimator == "full",
        extra_column=score_position == "after_last",
        weighting="row_then_token_mean" if loss_aggregation == "sequence" else "token_mean",
        min_group=2 if drop_uniform_groups or dynamic_sampling else 1,
        resample=dynamic_sampling,
        uniform=uniform,
    )


def _choose(
    e: AdvantageInputs, advantages: Tensor, tokens: Tensor, choose: Callable[[Tensor], Tensor]
) -> Tensor:
    """``choose`` among the covariances of the ``tokens`` of all ranks.  bool [B, R]."""
    covariance = covariances(e.model_outputs.logprobs, advantages, tokens, all_reduce=e.all_reduce)
    values, own = gather_values(
        covariance[tokens], all_reduce=e.all_reduce, rank=e.rank, world_size=e.world_size
    )
    return torch.zeros_like(tokens).masked_scatter(tokens, choose(values)[own])


def _values_after(e: AdvantageInputs, credit: CreditLevel) -> Tensor:
    """V after the last token of truncated responses, 0 for the others.  float32 [B]."""
    known = ~e.rollout.terminated
    if credit == "turn":  # turn starts only: a value there follows an observation
        last = last_true(e.rollout.response_mask)[:, None]
        known &= ~e.rollout.loss_mask.gather(1, last)[:, 0]
    return require(e.model_outputs.last_values, "values") * known
