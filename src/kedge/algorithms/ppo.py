"""PPO with a learned value baseline.

Schulman et al. 2017 (arXiv:1707.06347); for language models Ziegler et al. 2019
(arXiv:1909.08593) and Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO"
(arXiv:2403.17031).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from kedge.algorithms.base import (
    AdvantageInputs,
    Algorithm,
    CreditLevel,
    dense_rewards,
    policy_metrics,
    policy_terms,
    reference_kl,
    trained_turns,
    turn_numbers,
    uniform_rows,
)
from kedge.math.advantage import gae
from kedge.math.losses import (
    ClipRange,
    RatioMask,
    as_clip,
    clipped_value_loss,
    value_is_clipped,
)
from kedge.math.masked import extend, last_true, moments, whiten
from kedge.math.rewards import move_last, place_score
from kedge.math.turns import broadcast_turns, segment_sum, turn_starts
from kedge.records.errors import ConfigError
from kedge.records.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require

ScorePosition = Literal["last", "after_last"]
LambdaByLength = Callable[[Tensor], Tensor]  # actions bool [B, R] -> lambda [B]


def ppo(
    *,
    gamma: float = 1.0,
    lam: float | LambdaByLength = 0.95,
    cliprange: ClipRange | RatioMask = 0.2,
    cliprange_value: float = 0.2,
    vf_coef: float = 0.1,
    kl_estimator: str = "k1",
    whiten_rewards: bool = False,
    whiten_advantages: bool | Literal["batch"] = True,
    score_position: ScorePosition = "last",
    bootstrap_truncated: bool = False,
    lam_value: float | None = None,
    credit: CreditLevel = "token",
) -> Algorithm:
    """PPO: GAE on KL-penalized rewards, clipped policy and value losses.

        r_t = -kl_coef KL_t + [t has the score] score      A = scale(GAE(r, V))
        L = sum_t w_t (-min(rho_t A_t, clip(rho_t) A_t)) + vf_coef sum_t v_t L_value,t

    scale(x) = (x - mean x) / max(std x, 1).  Unlike whitening, never scales up: if every response
    succeeds, x is only the value model's error, and amplifying it would undo what was learned.

    With ``credit="turn"`` a turn of an episode is one action: its reward is the sum over its
    tokens, V is that of the state before its first token (the only one the value model is trained
    on), GAE steps from turn to turn, and all tokens of the turn share the advantage.  Advantages
    are scaled over turns (Turn-PPO, Li et al. 2025, arXiv:2512.17008).

    Args:
        gamma: discount factor per token, or per turn with ``credit="turn"``.
        lam: GAE's lambda, or a function that maps the actions (bool [B, R]) to one lambda per row,
            such as ``partial(length_adaptive_lambda, alpha=0.05)`` (VAPO, arXiv:2504.05118).
        cliprange: clip range of the ratio, epsilon in eq. 7 of arXiv:1707.06347.  A pair sets the
            ranges below and above 1 (clip-higher; DAPO uses 0.28 above).  ``Clip(low, high,
            ceiling)`` also limits the ratio of tokens with a negative advantage (dual clip,
            arXiv:1912.09729, with 3).  With ``RatioMask(low, high)``, tokens whose ratio is outside
            the range give no gradient, whatever the sign of their advantage (SAO, arXiv:2607.07508,
            with 0.3 and 5), but count in the mean.  ``kedge.engine`` exports both.
        cliprange_value: how far a new value may move from the old one before its loss is clipped.
        vf_coef: weight of the value loss.
        kl_estimator: KL estimator: "k1", "k2", "k3", "abs" or "full" (see ``kedge.math.kl``).
        whiten_rewards: scale rewards to unit variance without changing their mean.
        whiten_advantages: center advantages and scale them down, never up, to unit variance;
            "batch": always scale to unit variance, as TRL does.
        score_position: "last" puts the score on the last token.  "after_last" puts it one slot
            later where there is room, together with per-token rewards of the last token, and scales
            advantages as "batch" does; TRL and arXiv:2403.17031 do this.
        bootstrap_truncated: for truncated responses, bootstrap from the value after the last token;
            with ``credit="turn"``, only for those that end with an observation.
        lam_value: GAE's lambda for the value targets; None: ``lam``, or 1 if ``lam`` is a function,
            as in VAPO.  With 1, the targets are unbiased, which helps with long responses (VC-PPO,
            arXiv:2503.01491).
        credit: what one action is: a "token", or a "turn" in tasks with many turns.

    Raises:
        ConfigError: ``credit="turn"`` with ``score_position="after_last"``.
    """
    if credit == "turn" and score_position == "after_last":
        raise ConfigError(
            "credit='turn' needs every reward on a token of its turn, but"
            " score_position='after_last' puts the score after the last one; use 'last'"
        )
    by_batch = whiten_advantages == "batch" or score_position == "after_last"
    target_lam = (1.0 if callable(lam) else lam) if lam_value is None else lam_value
    clip = cliprange if isinstance(cliprange, RatioMask) else as_clip(cliprange)

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        mask = e.rollout.loss_mask  # [B, R]
        value_mask = extend(mask) if score_position == "after_last" else mask
        kl = reference_kl(e, kl_estimator)
        scores = place_score(e.reward_output.scores, mask)
        rewards = (scores + dense_rewards(e.reward_output, mask)).float()
        rewards = move_last(rewards, mask, value_mask)
        rewards = rewards if kl is None else rewards - kl_coef * kl
        turn, actions = turn_numbers(e.rollout) if credit == "turn" else None, mask
        if turn is not None:
            actions = value_mask = turn_starts(turn)
            rewards = segment_sum(rewards, turn) * actions
        if whiten_rewards:
            rewards = whiten(rewards, value_mask, center=False, all_reduce=e.all_reduce)
        values = require(e.model_outputs.values, "values")
        after = _values_after(e, credit) if bootstrap_truncated else None
        estimate = partial(gae, rewards, values, value_mask, gamma=gamma, after=after)
        raw = estimate(lam=lam(actions) if callable(lam) else lam)
        target = raw if target_lam == lam else estimate(lam=target_lam)
        returns = (target + values) * value_mask
        trained = e.trained if turn is None else trained_turns(turn, e.trained)
        scaled = whiten(raw, trained, all_reduce=e.all_reduce, least=0.0 if by_batch else 1.0)
        advantages = scaled if whiten_advantages else raw * actions
        if turn is not None:
            advantages = broadcast_turns(advantages, turn)
        return AdvantageOutput(
            rewards=rewards,
            advantages=advantages,
            returns=returns,
            kl=kl,
            value_mask=value_mask,
            deviation=moments(raw, trained, all_reduce=e.all_reduce)[1],
        )

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        x, w, v = mb.rows, mb.token_weight, mb.value_weight
        terms = policy_terms(new, mb, clip)
        policy = (w * terms.loss).sum()
        values, old, returns = (require(y, "values") for y in (new.values, x.old_values, x.returns))
        value = (v * clipped_value_loss(values, old, returns, clip=cliprange_value)).sum()
        value_clipped = value_is_clipped(values, old, returns, clip=cliprange_value)
        parts = {"policy": policy, "value": vf_coef * value}
        metrics = policy_metrics(terms, policy, new, mb, w) | {
            "loss/value_avg": value,
            "policy/policykl_avg": -(w * terms.log_ratio).sum(),
            "val/clipfrac_avg": (v * value_clipped).sum(),
        }
        return Loss(parts=parts, metrics=metrics)

    return Algorithm(
        name="ppo",
        compute_advantages=compute_advantages,
        loss=loss,
        needs_values=True,
        needs_full_kl=kl_estimator == "full",
        extra_column=score_position == "after_last",
        uniform=partial(uniform_rows, credit=credit),
    )


def _values_after(e: AdvantageInputs, credit: CreditLevel) -> Tensor:
    """V after the last token of truncated responses, 0 for the others.  float32 [B]."""
    known = ~e.rollout.terminated
    if credit == "turn":  # turn starts only: a value there follows an observation
        last = last_true(e.rollout.response_mask)[:, None]
        known &= ~e.rollout.loss_mask.gather(1, last)[:, 0]
    return require(e.model_outputs.last_values, "values") * known
