"""An algorithm: two pure functions, their inputs, and the parts that algorithms share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kedge.math.advantage import group_mean, group_std
from kedge.math.kl import ESTIMATORS
from kedge.math.losses import (
    Clip,
    RatioMask,
    clipped_policy_loss,
    masked_policy_loss,
    policy_is_clipped,
    policy_is_masked,
)
from kedge.math.masked import AllReduce, moments, one_rank, standardize
from kedge.math.ratios import RatioLevel, ratios
from kedge.math.rewards import place_score
from kedge.math.turns import (
    broadcast_turns,
    number_turns,
    segment_sum,
    turn_groups,
    turn_returns,
    turn_starts,
)
from kedge.records.errors import ConfigError
from kedge.records.types import (
    AdvantageOutput,
    Loss,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    RewardOutput,
    Rollout,
    require,
)

Bounds = float | Sequence[float] | None
CreditLevel = Literal["token", "turn"]
# scores, group, valid, trained -> advantages, all [n]
Compare = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Everything known about a batch when advantages are computed.

    ``rollout.loss_mask`` is already False on rows whose reward is not valid.  Tokens in
    ``excluded`` have rewards and are part of returns and group baselines, but do not train:
    statistics of advantages, such as whitening, are those of ``trained``.
    """

    rollout: Rollout
    reward_output: RewardOutput
    model_outputs: ModelOutputs
    all_reduce: AllReduce = field(default=one_rank)
    excluded: Tensor | None = None  # bool [B, R]; tokens too old, or rejected by the correction

    @property
    def trained(self) -> Tensor:
        """Tokens that are trained on, bool [B, R]."""
        mask = self.rollout.loss_mask
        return mask if self.excluded is None else mask & ~self.excluded


def uniform_rows(
    rollout: Rollout, reward_output: RewardOutput, *, credit: CreditLevel = "token"
) -> Tensor:
    """Rows in groups whose members score the same, ignoring the KL.  bool [B].

    They compare scores, or with ``credit="turn"`` the sums of rewards from each turn on.  A valid
    row that is alone in its group counts as uniform.
    """
    group, valid = rollout.prompts.group, reward_output.valid
    mask = rollout.loss_mask & valid[:, None]
    scores = torch.where(valid, reward_output.scores, 0.0)
    dense = dense_rewards(reward_output, mask)
    if credit == "token":
        return ~(group_std(scores + dense_totals(dense), group, valid) > 0)
    turn = turn_numbers(replace(rollout, loss_mask=mask))
    starts, returns = turn_starts(turn), turn_returns(place_score(scores, mask) + dense, turn)
    present = torch.ones_like(returns[starts], dtype=torch.bool)
    spread = group_std(returns[starts].float(), turn_groups(turn, group), present)
    differs = torch.zeros_like(returns).masked_scatter(starts, (spread > 0).to(returns.dtype))
    return group_mean(differs.sum(1), group, valid) == 0


def dense_rewards(reward_output: RewardOutput, mask: Tensor) -> Tensor:
    """Dense rewards where ``mask``, float64 [B, R]; float32 zeros if there are none."""
    dense = reward_output.token_rewards
    return torch.zeros(mask.shape, device=mask.device) if dense is None else mask * dense


def turn_numbers(rollout: Rollout) -> Tensor:
    """The turn number of each trained token, from the episodes or by runs of the loss mask."""
    mask, episodes = rollout.loss_mask, rollout.episodes
    return number_turns(mask) if episodes is None else torch.where(mask, episodes.turn, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How advantages are computed, and the loss that uses them.

    Args:
        name: shown in logs and model cards.
        compute_advantages: ``(inputs, kl_coef) -> AdvantageOutput``, called once per iteration
            without gradient.
        loss: ``(policy output, micro-batch) -> Loss``: a weighted sum, never a mean.
        needs_values: a value model predicts V before each response token.
        needs_reference: the reference policy's log-probabilities are computed.
        needs_full_kl: the exact KL over the vocabulary is computed per token.
        weighting: weights of tokens in the loss, a key of ``kedge.math.losses.WEIGHTINGS``.
        min_group: smallest number of responses per prompt that the algorithm supports.
        extra_column: scores are placed one slot after the last token, if there is room.
        needs_greedy: the greedy response to each prompt is sampled and scored, too.
        resample: rounds in which ``uniform`` groups are replaced by other prompts (DAPO).
        uniform: ``(rollout, reward output) -> bool [B]``: rows whose group has nothing to compare.
    """

    name: str
    compute_advantages: Callable[[AdvantageInputs, float], AdvantageOutput]
    loss: Callable[[PolicyOutput, MicroBatch], Loss]
    needs_values: bool = False
    needs_reference: bool = True
    needs_full_kl: bool = False
    weighting: str = "token_mean"
    min_group: int = 1
    extra_column: bool = False
    needs_greedy: bool = False
    resample: int = 0
    uniform: Callable[[Rollout, RewardOutput], Tensor] = uniform_rows


def reference_kl(e: AdvantageInputs, estimator: str) -> Tensor | None:
    """KL per trained token by ``estimator``; None without a reference.  float32 [B, R]."""
    outputs, mask = e.model_outputs, e.rollout.loss_mask
    if outputs.ref_logprobs is None and outputs.full_kl is None:
        return None
    if estimator == "full":
        return require(outputs.full_kl, "full_kl") * mask
    if estimator not in ESTIMATORS:
        known = ", ".join((*ESTIMATORS, "full"))
        raise ConfigError(f"kl_estimator must be one of {known}, got {estimator!r}")
    return (
        ESTIMATORS[estimator](outputs.logprobs, require(outputs.ref_logprobs, "reference")) * mask
    )


def dense_totals(dense: Tensor) -> Tensor:
    """Sum of the dense rewards of each row; 0 where they cancel.  [B, R] -> float32 [B]."""
    totals = dense.sum(1)
    # What is left where they cancel is a rounding error, and would make equal groups differ.
    return torch.where(totals.abs() > 1e-5 * dense.abs().sum(1), totals, 0.0).float()


def shaped_rewards(
    e: AdvantageInputs, *, normalize: bool = False, clip: Bounds = None
) -> tuple[Tensor, Tensor]:
    """Scores and dense token rewards; their sum per response is normalized, then clipped.

    Dense rewards are scaled by the same factor as the sum, so that they stay in proportion: in
    episodes they move parts of the score to earlier turns.  ``normalize``: (sum - mean) / (std +
    1e-4) over the valid rows of all ranks.  ``clip``: bounds ``(low, high)``, or one number c, also
    as ``(c,)``, for ``(-c, c)``.

    Returns:
        Scores float32 [B], 0 where not valid; dense rewards as of ``dense_rewards``.
    """
    valid = e.reward_output.valid
    scores = torch.where(valid, e.reward_output.scores, 0.0)
    dense = dense_rewards(e.reward_output, e.rollout.loss_mask)
    if not normalize and clip is None:
        return scores, dense
    whole = scores + dense_totals(dense)
    factor = torch.ones_like(whole)
    if normalize:
        _, std = moments(whole, valid, all_reduce=e.all_reduce)
        whole, factor = standardize(whole, valid, all_reduce=e.all_reduce), factor / (std + 1e-4)
    if clip is not None:
        bounds = [float(clip)] if isinstance(clip, int | float) else [*map(float, clip)]
        low, high = bounds if len(bounds) == 2 else (-bounds[0], bounds[0])
        clipped = whole.clamp(low, high)
        factor = factor * (clipped / whole).nan_to_num(1.0).clamp(0, 1)
        whole = clipped
    dense = factor[:, None] * dense
    return torch.where(valid, whole - dense_totals(dense), 0.0), dense


def trained_turns(turn: Tensor, trained: Tensor) -> Tensor:
    """The first token of each turn with a trained token.  bool [B, R]."""
    return turn_starts(turn) & (segment_sum(trained.float(), turn) > 0)


def group_advantages(
    e: AdvantageInputs,
    totals: Tensor,
    rewards: Tensor,
    trained: Tensor,
    compare: Compare,
    credit: CreditLevel,
) -> Tensor:
    """Advantages by comparing the responses to a prompt, as a whole or turn by turn.

        "token":  A_i     = compare(total_i among the rows of the group)
        "turn":   A_{i,k} = compare(G_{i,k} among the rows of the group that have a turn k)

    G is the sum of the rewards of turn k and all later ones (GTPO, Ding et al. 2025,
    arXiv:2511.14846).  All tokens of a response or turn share the advantage.  ``totals`` are
    float32 [B] per response, ``rewards`` [B, R] per token, of which ``trained`` bool [B, R] train.
    Returns of turns are rounded to float32, so that sums of float64 that are equal compare equal.

    Returns:
        float32 [B, R], 0 outside the mask.
    """
    mask, group = e.rollout.loss_mask, e.rollout.prompts.group
    if credit == "token":
        return compare(totals, group, e.reward_output.valid, trained.any(1))[:, None] * mask
    # The k-th turns of all responses form a group: later ones may be missing in some of them.
    turn = turn_numbers(e.rollout)
    starts, returns = turn_starts(turn), turn_returns(rewards, turn).float()
    groups = turn_groups(turn, group)
    present = torch.ones_like(groups, dtype=torch.bool)
    compared = compare(returns[starts], groups, present, trained_turns(turn, trained)[starts])
    at_starts = torch.zeros_like(returns).masked_scatter(starts, compared.to(returns.dtype))
    return broadcast_turns(at_starts, turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """The policy loss of each token, before it is weighted and summed.  [b, R]."""

    log_ratio: Tensor  # log p - log p_old, 0 where the token does not train
    ratio: Tensor  # per token, or the ratio of the whole response
    loss: Tensor  # -min(ratio A, clip(ratio) A), or -ratio A inside the clip range
    clipped: Tensor  # bool; tokens whose gradient the clip sets to 0


def policy_terms(
    new: PolicyOutput,
    mb: MicroBatch,
    clip: Clip | RatioMask,
    level: RatioLevel = "token",
) -> PolicyTerms:
    """The clipped or masked loss of each token, with ratios as in ``kedge.math.ratios``."""
    x = mb.rows
    log_ratio = (new.logprobs - x.old_logprobs) * x.loss_mask
    ratio = ratios(log_ratio, x.loss_mask, level)
    if isinstance(clip, RatioMask):
        loss = masked_policy_loss(ratio, x.advantages, bounds=clip)
        clipped = policy_is_masked(ratio, clip)
    else:
        loss = clipped_policy_loss(ratio, x.advantages, clip=clip)
        clipped = policy_is_clipped(ratio, x.advantages, clip=clip)
    return PolicyTerms(log_ratio=log_ratio, ratio=ratio, loss=loss, clipped=clipped)


def policy_metrics(
    terms: PolicyTerms,
    policy: Tensor,
    new: PolicyOutput,
    mb: MicroBatch,
    weight: Tensor,
    *,
    sides: Clip | None = None,
) -> dict[str, Tensor]:
    """Metrics of the loss ``policy``, with ``weight`` per token [b, R].

    With ``sides``, also the shares of tokens clipped below and above.  A metric of one dimension
    holds log ratios, NaN where a token does not train: the learner logs their range.
    """
    metrics = {
        "loss/policy_avg": policy,
        "policy/clipfrac_avg": (weight * terms.clipped).sum(),
        "policy/approxkl_avg": (weight * 0.5 * terms.log_ratio**2).sum(),
        "policy/entropy_avg": (mb.token_weight * new.entropy).sum(),
        "val/ratio": (weight * terms.ratio).sum(),
        "policy/ratio": terms.log_ratio.masked_fill(mb.token_weight == 0, torch.nan).flatten(),
    }
    if sides is not None:
        low = (terms.ratio < 1 - sides.low) & (mb.rows.advantages < 0)
        high = (terms.ratio > sides.top) & (mb.rows.advantages > 0)
        metrics["clip_ratio/low_mean"] = (weight * low).sum()
        metrics["clip_ratio/high_mean"] = (weight * high).sum()
    return metrics


def check_loss_kl(option: str, estimator: str) -> None:
    """Check that the KL in the loss can be computed."""
    if estimator not in ESTIMATORS:
        raise ConfigError(f"{option} must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
