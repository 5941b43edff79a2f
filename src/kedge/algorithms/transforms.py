"""Filters and penalties for any algorithm: functions Algorithm -> Algorithm.

    drop_uniform_groups(penalize_overlong(grpo(), buffer=64, response_length=512))

A transform replaces functions of the algorithm that it gets and has no state.  Apply them in this
order; each group may follow the algorithm or an earlier group:

1. Scores: ``penalize_overlong``, ``divide_scores``; advantages: ``decouple_rewards``.
2. Filters: ``mask_truncated``, ``drop_uniform_groups``, ``resample_uniform_groups``.
3. The loss: ``divide_by_length``, ``add_entropy``, ``start_ratios_at_1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs, Algorithm
from kedge.math.advantage import group_count, normalize_then_sum
from kedge.math.rewards import overlong_penalty
from kedge.records.errors import ConfigError
from kedge.records.types import (
    AdvantageOutput,
    Loss,
    MicroBatch,
    PolicyOutput,
    RewardOutput,
    Rollout,
)

Scores = Callable[[Rollout, RewardOutput], RewardOutput]


def with_scores(algorithm: Algorithm, change: Scores) -> Algorithm:
    """The algorithm with other scores, both in its advantages and to tell uniform groups."""

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        changed = change(e.rollout, e.reward_output)
        return algorithm.compute_advantages(replace(e, reward_output=changed), kl_coef)

    def uniform(rollout: Rollout, reward_output: RewardOutput) -> Tensor:
        return algorithm.uniform(rollout, change(rollout, reward_output))

    return replace(algorithm, compute_advantages=compute_advantages, uniform=uniform)


def penalize_overlong(algorithm: Algorithm, *, buffer: int, response_length: int) -> Algorithm:
    """Scores fall by up to 1 over the last ``buffer`` tokens before the length limit.

    Soft overlong punishment of DAPO, arXiv:2503.14476; see ``kedge.math.rewards``.

    Raises:
        ConfigError: ``buffer`` is not between 1 and ``response_length``.
    """
    if not 1 <= buffer <= response_length:
        raise ConfigError(
            f"overlong_buffer={buffer} must be between 1 and response_length={response_length}"
        )

    def penalized(rollout: Rollout, reward_output: RewardOutput) -> RewardOutput:
        lengths = (rollout.loss_mask & reward_output.valid[:, None]).sum(1)
        penalty = overlong_penalty(lengths, longest=response_length, buffer=buffer)
        return replace(reward_output, scores=reward_output.scores + penalty)

    return with_scores(algorithm, penalized)


def divide_scores(algorithm: Algorithm, scale: float) -> Algorithm:
    """Scores and dense rewards divided by ``scale``, such as a running standard deviation.

    The deviation is state of a run, so the loop keeps it and applies this in every iteration.
    """
    return with_scores(algorithm, lambda rollout, reward_output: reward_output.divide(scale))


def decouple_rewards(algorithm: Algorithm, weights: Sequence[float] | None = None) -> Algorithm:
    """GDPO: every reward is normalized in its group before the sum, which is normalized again.

    The advantages of ``kedge.math.advantage.normalize_then_sum``, of whole responses and without
    penalties.  ``weights``: one per reward; None: 1.
    """

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        parts = e.reward_output.components
        rewards, split = [*parts.values()], [name for name in parts if "/" in name]
        if split or len(rewards) != len(weights or rewards):
            raise ConfigError(
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


def without_reference(algorithm: Algorithm) -> Algorithm:
    """The algorithm without a reference policy, and so without a KL penalty in the reward."""
    return replace(algorithm, needs_reference=False, needs_full_kl=False)


# -- filters: what is left out counts for baselines and returns, and does not train ----------------


def mask_truncated(algorithm: Algorithm) -> Algorithm:
    """Exclude responses truncated by a limit from training policy and value model."""

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        output, kept = _leave_out(algorithm, e, kl_coef, ~e.rollout.terminated)
        if output.value_mask is not None:
            output = replace(output, value_mask=output.value_mask & kept)
        return output

    return replace(algorithm, compute_advantages=compute_advantages)


def drop_uniform_groups(algorithm: Algorithm) -> Algorithm:
    """Exclude groups with nothing to compare, such as equal scores, from training the policy.

    They train the value model.  With one, a response that is alone in its group trains the policy,
    too: its advantage is no comparison with others.
    """

    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        uniform = algorithm.uniform(e.rollout, e.reward_output)
        if algorithm.needs_values:
            several = group_count(e.rollout.prompts.group, e.reward_output.valid) > 1
            uniform = uniform & several
        return _leave_out(algorithm, e, kl_coef, uniform)[0]

    min_group = max(2, algorithm.min_group)
    return replace(algorithm, compute_advantages=compute_advantages, min_group=min_group)


def resample_uniform_groups(algorithm: Algorithm, *, rounds: int) -> Algorithm:
    """Replace groups with nothing to compare by other prompts, up to ``rounds`` times (DAPO)."""
    return replace(algorithm, resample=rounds, min_group=max(2, algorithm.min_group))


def _leave_out(
    algorithm: Algorithm, e: AdvantageInputs, kl_coef: float, rows: Tensor
) -> tuple[AdvantageOutput, Tensor]:
    """Advantages whose statistics and loss leave out ``rows`` bool [B]; and the kept rows [B, 1].

    Excluded before the advantages are computed: whitening must not see tokens that do not train.
    """
    mask, out = e.rollout.loss_mask, rows[:, None]
    excluded = mask & out if e.excluded is None else e.excluded | (mask & out)
    output = algorithm.compute_advantages(replace(e, excluded=excluded), kl_coef)
    trained = mask if output.loss_mask is None else output.loss_mask
    return replace(output, loss_mask=trained & ~out), ~out


# -- losses ----------------------------------------------------------------------------------------


def divide_by_length(algorithm: Algorithm, *, response_length: int) -> Algorithm:
    """The weight of a token in the policy loss is 1 / (rows response_length), as in Dr. GRPO.

    For algorithms that weigh tokens by ``mb.token_weight``.  A policy loss is proportional to
    positive factors of an advantage (ADR 7), so it alone changes; value loss, KL and metrics keep
    their weights.
    """

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        x, weight = mb.rows, mb.token_weight
        factor = torch.where(weight > 0, mb.row_weight[:, None] / (response_length * weight), 0.0)
        return algorithm.loss(new, replace(mb, rows=replace(x, advantages=factor * x.advantages)))

    return replace(algorithm, loss=loss)


def add_entropy(algorithm: Algorithm, coef: float) -> Algorithm:
    """The loss minus ``coef`` times the mean entropy per token.

    The learner computes entropies with a gradient where its options ask for a bonus.
    """

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        out, entropy = algorithm.loss(new, mb), (mb.token_weight * new.entropy).sum()
        return replace(
            out,
            parts={**out.parts, "entropy": -coef * entropy},
            metrics={**out.metrics, "policy/entropy_avg": entropy},
        )

    return replace(algorithm, loss=loss)


def start_ratios_at_1(algorithm: Algorithm) -> Algorithm:
    """Ratios to the log-probabilities of the training pass itself, so that they are exactly 1.

    For the only optimizer step of an iteration in low precision, where log-probabilities differ
    between passes of different shapes.
    """

    def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
        rows = replace(mb.rows, old_logprobs=new.logprobs.detach())
        return algorithm.loss(new, replace(mb, rows=rows))

    return replace(algorithm, loss=loss)
