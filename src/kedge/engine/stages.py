"""The stages of one iteration, each a function of the record before it.

collect (rollout/sampling.py) -> make_experience
    -> optimize (cut -> Learner.optimizer_step, per optimizer step)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from statistics import fmean

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs, Algorithm
from kedge.engine.batch_metrics import batch_metrics, token_ages
from kedge.engine.early_stopping import StepLimits
from kedge.engine.metrics import Tally, reduce_metrics
from kedge.engine.micro_batches import cut
from kedge.errors import ConfigError, RewardError, RolloutError
from kedge.math.importance import Correction, importance_weights
from kedge.protocols import Learner, LossFn
from kedge.types import (
    AdvantageOutput,
    Experience,
    Loss,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    RewardOutput,
    Rollout,
)


def make_experience(
    rollout: Rollout,
    reward_output: RewardOutput,
    learner: Learner,
    algo: Algorithm,
    kl_coef: float,
    correction: Correction | None = None,
    max_token_lag: int | None = None,
) -> tuple[Experience, dict[str, float]]:
    """Compute log-probabilities, values and advantages of a rollout.

    The denominator of the ratio is the learner's policy or, for stale tokens, the behavior policy.
    With a ``correction`` it is the learner's for all tokens, and advantages are multiplied by
    bounded importance weights (learner / rollout engine): decoupled PPO
    (Hilton et al. 2021, arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298, eq. 5).  Tokens sampled
    more than ``max_token_lag`` iterations ago are left out of the losses.
    """
    _check_scores(reward_output)
    rollout = replace(rollout, loss_mask=rollout.loss_mask & reward_output.valid[:, None])
    model_outputs = learner.compute_logprobs(
        rollout,
        values=algo.needs_values,
        reference=algo.needs_reference,
        full_kl=algo.needs_full_kl,
    )
    age = learner.version - rollout.token_versions
    known = rollout.token_versions >= 0
    stale = known & (age > 0)
    behavior, current = rollout.behavior_logprobs, model_outputs.logprobs
    if behavior is not None and correction is None:
        model_outputs = replace(model_outputs, logprobs=torch.where(stale, behavior, current))
    inputs = AdvantageInputs(
        rollout=rollout,
        reward_output=reward_output,
        model_outputs=model_outputs,
        total=learner.total,
    )
    advantage_output = algo.compute_advantages(inputs, kl_coef)
    _check_advantages(advantage_output, algo, rollout.loss_mask)
    tally = Tally()
    if behavior is not None and current is not behavior:
        gap = (behavior - current).abs()
        tally.mean("rollout/logprob_gap", gap, rollout.loss_mask & ~stale)
        tally.mean("rollout/stale_gap", gap, rollout.loss_mask & stale)
    if correction is not None:
        advantage_output = _apply_correction(advantage_output, rollout, current, correction, tally)
    lag = (learner.version - rollout.version).clamp(min=0)
    tally.mean("rollout/lag", lag, rollout.version >= 0)
    if max_token_lag is not None:
        too_old = known & (age > max_token_lag)
        tally.mean("rollout/too_old_tokens", too_old, rollout.loss_mask)
        advantage_output = _without(too_old, advantage_output, rollout.loss_mask)
    metrics = batch_metrics(inputs, advantage_output, kl_coef, tally)
    trained = (
        rollout.loss_mask if advantage_output.loss_mask is None else advantage_output.loss_mask
    )
    metrics |= token_ages(age.clamp(min=0), known & trained, learner.total)
    metrics |= {
        f"log/{n}": mean for n, mean in reduce_metrics(reward_output.metrics, learner).items()
    }
    if rollout.episodes is not None:
        metrics |= reduce_metrics(rollout.episodes.metrics, learner)
    return _build_experience(rollout, model_outputs, advantage_output), metrics


def _check_scores(reward_output: RewardOutput) -> None:
    bad = reward_output.valid & ~reward_output.scores.isfinite()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise RewardError(
            f"rewards must be finite, got {float(reward_output.scores[row])} for row {row}; a"
            " weighted sum may overflow, or a reward function may divide by zero. Set valid=False"
            " for rows that cannot be scored"
        )


def _check_advantages(advantage_output: AdvantageOutput, algo: Algorithm, mask: Tensor) -> None:
    """Check shapes: fields of another shape would silently be broadcast over tokens."""
    for field in fields(advantage_output):
        x = getattr(advantage_output, field.name)
        if x is not None and x.shape != mask.shape:
            raise ConfigError(
                f"{field.name} from compute_advantages of {algo.name} must have one number per"
                f" response token, shape {tuple(mask.shape)}, got {tuple(x.shape)}; expand a number"
                " per response with x[:, None] * inputs.rollout.loss_mask"
            )
    if not bool(advantage_output.advantages[mask].isfinite().all()):
        raise ConfigError(
            f"compute_advantages of {algo.name} returned advantages that are not finite"
        )


def _apply_correction(
    advantage_output: AdvantageOutput,
    rollout: Rollout,
    current: Tensor,
    how: Correction,
    tally: Tally,
) -> AdvantageOutput:
    """Advantages multiplied by the importance weights of their tokens.

    Losses are proportional to positive factors of an advantage, so this weights the token in the
    loss of any algorithm.
    """
    if rollout.behavior_logprobs is None:
        raise RolloutError(
            f"sampler_correction={how.kind!r} needs log-probabilities from the rollout engine,"
            " which records none; use an engine that does, or leave the option out"
        )
    weight = importance_weights(current, rollout.behavior_logprobs, rollout.loss_mask, how)
    tally.mean("rollout/correction_weight", weight, rollout.loss_mask)
    unbounded = replace(how, kind="truncate", high=float("inf"), low=0.0)
    raw = importance_weights(current, rollout.behavior_logprobs, rollout.loss_mask, unbounded)
    bounded = weight != raw
    tally.mean("rollout/correction_bounded", bounded, rollout.loss_mask)
    return replace(advantage_output, advantages=advantage_output.advantages * weight)


def _without(
    tokens: Tensor, advantage_output: AdvantageOutput, loss_mask: Tensor
) -> AdvantageOutput:
    """Leave tokens out of the losses; advantages of the others do not change."""
    masks = {
        name: (loss_mask if mask is None else mask & loss_mask) & ~tokens
        for name in ("loss_mask", "value_mask")
        for mask in [getattr(advantage_output, name)]
    }
    return replace(advantage_output, **masks)


def _build_experience(
    rollout: Rollout, model_outputs: ModelOutputs, advantage_output: AdvantageOutput
) -> Experience:
    mask = rollout.loss_mask
    if advantage_output.loss_mask is not None:
        mask = mask & advantage_output.loss_mask
    return Experience(
        prompt_ids=rollout.prompts.ids,
        prompt_mask=rollout.prompts.mask,
        ids=rollout.ids,
        loss_mask=mask,
        response_mask=rollout.response_mask,
        value_mask=mask if advantage_output.value_mask is None else advantage_output.value_mask,
        old_logprobs=model_outputs.logprobs,
        ref_logprobs=model_outputs.ref_logprobs,
        old_values=model_outputs.values,
        rewards=advantage_output.rewards,
        advantages=advantage_output.advantages,
        returns=advantage_output.returns,
        behavior_logprobs=rollout.behavior_logprobs,
        allowed_tokens=rollout.allowed_tokens,
    )


def optimize(  # noqa: PLR0913
    experience: Experience,
    learner: Learner,
    algo: Algorithm,
    *,
    epochs: int,
    minibatches: int,
    micro_rows: int,
    seed: int,
    max_tokens: int | None = None,
    only_value: bool = False,
    anchor_new: bool = False,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    step_limits: StepLimits | None = None,
) -> dict[str, float]:
    """``epochs`` passes over the experience, ``minibatches`` optimizer steps each.

    Mini-batches are drawn from the rows of all ranks, so they do not depend on the world size;
    each rank processes an equal share of every mini-batch.  With ``anchor_new`` the ratio is to the
    log-probabilities of the training pass itself, so it is exactly 1.
    """
    shuffle = torch.Generator().manual_seed(seed)
    share = slice(None)
    if minibatches > 1 and learner.world_size > 1:
        experience, share = (
            learner.all_gather(experience),
            slice(learner.rank, None, learner.world_size),
        )
    limits, loss = step_limits or StepLimits(), algo.loss
    if anchor_new:
        loss = _anchored(loss)
    history: list[dict[str, float]] = []

    def should_apply(metrics: Mapping[str, float]) -> bool:
        apply = limits.should_apply(metrics)
        if apply:
            before_step()
        return apply

    for _ in range(epochs):
        order = torch.randperm(len(experience), generator=shuffle)
        for index in order.chunk(minibatches):
            step = cut(
                experience,
                index[share],
                algo,
                micro_rows,
                learner.total,
                max_tokens=max_tokens,
                by_prompt=learner.shares_prompts,
            )
            metrics = learner.optimizer_step(
                step, loss, only_value=only_value, should_apply=should_apply
            )
            history.append(metrics)
            after_step()
            if limits.should_stop(metrics):
                return _mean_over_steps(history)
    return _mean_over_steps(history)


def _anchored(loss: LossFn) -> LossFn:
    """The loss with the policy's new log-probabilities in place of the old ones."""

    def anchored(new: PolicyOutput, mb: MicroBatch) -> Loss:
        rows = replace(mb.rows, old_logprobs=new.logprobs.detach())
        return loss(new, replace(mb, rows=rows))

    return anchored


def _mean_over_steps(history: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of an iteration."""
    metrics = {name: fmean(h[name] for h in history if name in h) for name in history[0]}
    ratios = [h["val/ratio"] for h in history if "val/ratio" in h]
    if len(ratios) > 1:
        mean = fmean(ratios)
        metrics["val/ratio_var"] = sum((r - mean) ** 2 for r in ratios) / (len(ratios) - 1)
    elif ratios:
        metrics["val/ratio_var"] = 0.0
    return metrics
