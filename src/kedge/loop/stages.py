"""The stages of one iteration, each a function of the record before it.

collect (rollout/scheduler/collector.py) -> make_experience
    -> optimize (micro_batches -> Learner.optimizer_step, per optimizer step)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from statistics import fmean, variance

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs, Algorithm
from kedge.algorithms.transforms import add_entropy
from kedge.loop.control import StepControl
from kedge.math.losses import WEIGHTINGS, row_mean
from kedge.math.ratios import Correction, importance_weights
from kedge.records.errors import ConfigError, KedgeError, RewardError, RolloutError
from kedge.records.protocols import AllReduce, Learner, always
from kedge.records.types import (
    AdvantageOutput,
    Experience,
    MicroBatch,
    ModelOutputs,
    RewardOutput,
    Rollout,
    number_prompts,
)


def micro_batches(
    experience: Experience,
    index: Tensor,
    algo: Algorithm,
    micro_rows: int,
    all_reduce: AllReduce,
    *,
    max_tokens: int | None = None,
    by_prompt: bool = False,
) -> Iterator[MicroBatch]:
    """Split one optimizer step into micro-batches of at most ``micro_rows`` rows or ``max_tokens``.

    The weights of its tokens sum to 1 over all ranks, and are fixed before the split.
    """
    lengths = (experience.prompt_mask.sum(1) + experience.response_mask.sum(1))[index]
    order = lengths.argsort(descending=True, stable=True)
    if by_prompt:
        rows = index[order]
        prompts = number_prompts(experience.prompt_ids[rows], experience.prompt_mask[rows])
        order = order[_first_places(prompts).argsort(stable=True)]
    step = experience.rows(index[order])
    token_weights = WEIGHTINGS[algo.weighting]
    token, value, row = (
        token_weights(step.loss_mask, all_reduce),
        token_weights(step.value_mask, all_reduce),
        row_mean(step.loss_mask, all_reduce),
    )
    sizes: int | list[int] = micro_rows
    if max_tokens is not None:
        sizes = rows_within(lengths[order].tolist(), max_tokens, all_reduce)
    for part in torch.arange(len(step)).split(sizes):
        yield MicroBatch(
            rows=step.rows(part),
            token_weight=token[part],
            value_weight=value[part],
            row_weight=row[part],
        )


def _first_places(numbers: Tensor) -> Tensor:
    """For each number int64 [n], the index of its first occurrence."""
    places = torch.arange(len(numbers), device=numbers.device)
    first = places.new_full((len(numbers),), len(numbers))
    first = first.scatter_reduce(0, numbers, places, "amin") if len(numbers) else first
    return first[numbers]


def rows_within(lengths: Sequence[int], max_tokens: int, all_reduce: AllReduce) -> list[int]:
    """Rows of consecutive micro-batches of at most ``max_tokens`` tokens, padding included.

    A longer row is a micro-batch by itself.  All ranks, which have equally many rows, get the same
    number, as sharded weights require: others split their largest ones.
    """
    sizes: list[int] = []
    longest = 0
    for length in lengths:
        longest = max(longest, length)
        if sizes and longest * (sizes[-1] + 1) <= max_tokens:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = length
    ranks_with = torch.zeros(len(lengths) + 1)
    ranks_with[len(sizes)] = 1
    most = int(all_reduce(ranks_with).nonzero().max())
    while len(sizes) < most:
        largest = sizes.index(max(sizes))
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [sizes[largest] - half, half]
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Inputs of an experience, for the metrics of the batch."""

    inputs: AdvantageInputs
    outputs: AdvantageOutput  # as trained on
    kl_coef: float
    logprobs: Tensor  # float32 [B, R]; the learner's policy, before training
    age: Tensor  # int64 [B, R]; iterations since the token was sampled, 0 where unknown
    too_old: Tensor | None  # bool [B, R]
    correction: Correction | None
    weight: Tensor | None  # float32 [B, R]; of the correction
    uniform: Tensor  # bool [B]; the group of the row has nothing to compare


def make_experience(
    rollout: Rollout,
    reward_output: RewardOutput,
    learner: Learner,
    algo: Algorithm,
    kl_coef: float,
    correction: Correction | None = None,
    max_token_lag: int | None = None,
) -> tuple[Experience, Terms]:
    """Compute log-probabilities, values and advantages of a rollout.

    The denominator of the ratio is the learner's policy or, for stale tokens, the behavior policy.
    With a ``correction`` it is the learner's for all tokens, and advantages are multiplied by
    bounded importance weights (learner / rollout engine): decoupled PPO
    (Hilton et al. 2021, arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298, eq. 5).  With a
    correction of kind "ratio" it is the rollout engine's for all tokens, without weights.

    With either correction the KL in the reward is of the learner's policy pi: times its token's
    weight or ratio pi / mu, its gradient on samples of mu is that of KL(pi | ref) at every prefix,
    while log(mu / ref), fixed when the token was sampled, ignores how far pi has moved since.

    Untrained tokens leave the policy loss, its normalizer and the statistics of advantages:
    tokens that a correction of kind "mask" rejects, which also leave the value loss, and tokens
    sampled more than ``max_token_lag`` iterations ago, which keep their value target.
    """
    _check_scores(reward_output)
    # A row without a score stays, with weight 0: without it, ranks would hold different numbers of
    # micro-batches and wait for each other forever (ADR 2).
    mask = rollout.loss_mask & reward_output.valid[:, None]  # [B, R]
    rollout = replace(rollout, loss_mask=mask)
    model_outputs = learner.compute_logprobs(
        rollout,
        values=algo.needs_values,
        reference=algo.needs_reference,
        full_kl=algo.needs_full_kl,
    )
    if algo.needs_reference and model_outputs.ref_logprobs is None and not algo.needs_full_kl:
        raise ConfigError(
            f"algorithm={algo.name} needs a reference, but the learner returned no"
            " ref_logprobs; return them, or use without_reference(algorithm)"
        )
    check_finite_outputs(model_outputs, mask)
    logprobs, behavior = model_outputs.logprobs, rollout.behavior_logprobs  # [B, R]
    versions = rollout.token_versions  # [B, R]; -1: unknown
    age = torch.where(versions >= 0, learner.version - versions, 0)
    if correction is not None and behavior is None:
        raise RolloutError(
            f"sampler_correction={correction.kind!r} needs log-probabilities from the rollout"
            " engine, which records none; use an engine that does, or leave the option out"
        )
    direct = correction is not None and correction.kind == "ratio"
    old_logprobs = behavior if direct and behavior is not None else logprobs
    if behavior is not None and correction is None:
        old_logprobs = torch.where(age > 0, behavior, logprobs)
        model_outputs = replace(model_outputs, logprobs=old_logprobs)

    too_old = None if max_token_lag is None else age > max_token_lag
    # Rejected tokens leave the normalizer, too: counted there, they would shrink the step (ADR 7).
    weight = rejected = None
    if correction is not None and behavior is not None and not direct:
        trained = mask if too_old is None else mask & ~too_old
        weight = importance_weights(logprobs, behavior, trained, correction)  # 0 where not trained
        rejected = _rejected_tokens(weight, trained, mask, correction)
    excluded = [x for x in (too_old, rejected) if x is not None]
    inputs = AdvantageInputs(
        rollout=rollout,
        reward_output=reward_output,
        model_outputs=model_outputs,
        all_reduce=learner.all_reduce,
        excluded=reduce(torch.logical_or, excluded) if excluded else None,
    )
    outputs = algo.compute_advantages(inputs, kl_coef)
    _check_advantages(outputs, algo, mask)
    if weight is not None:
        # Losses are proportional to positive factors of an advantage: this weights the token in
        # the loss of any algorithm (ADR 7).
        outputs = replace(outputs, advantages=outputs.advantages * weight)

    loss_mask = mask if outputs.loss_mask is None else mask & outputs.loss_mask  # [B, R]
    value_mask = loss_mask if outputs.value_mask is None else outputs.value_mask
    if rejected is not None:  # also the slot after a response without trained tokens
        value_mask = value_mask & ~rejected & (mask & ~rejected).any(1, keepdim=True)
    if inputs.excluded is not None:
        loss_mask = loss_mask & ~inputs.excluded
        outputs = replace(outputs, loss_mask=loss_mask, value_mask=value_mask)
    experience = Experience(
        prompt_ids=rollout.prompts.ids,
        prompt_mask=rollout.prompts.mask,
        ids=rollout.ids,
        loss_mask=loss_mask,
        response_mask=rollout.response_mask,
        value_mask=value_mask,
        old_logprobs=old_logprobs,
        ref_logprobs=model_outputs.ref_logprobs,
        old_values=model_outputs.values,
        rewards=outputs.rewards,
        advantages=outputs.advantages,
        returns=outputs.returns,
        behavior_logprobs=behavior,
        allowed_tokens=rollout.allowed_tokens,
        context_start=rollout.context_start,
    )
    return experience, Terms(
        inputs=inputs,
        outputs=outputs,
        kl_coef=kl_coef,
        logprobs=logprobs,
        age=age,
        too_old=too_old,
        correction=correction,
        weight=weight,
        uniform=algo.uniform(rollout, reward_output),
    )


def _rejected_tokens(
    weight: Tensor, trained: Tensor, mask: Tensor, correction: Correction
) -> Tensor | None:
    """Tokens bool [B, R] that a correction of kind "mask" rejects; None for other kinds."""
    if correction.kind != "mask":
        return None
    rejected = trained & (weight == 0)
    return rejected if correction.level == "token" else mask & rejected.any(1, keepdim=True)


def _check_scores(reward_output: RewardOutput) -> None:
    bad = reward_output.valid & ~reward_output.scores.isfinite()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise RewardError(
            f"rewards must be finite, got {float(reward_output.scores[row])} for row {row}; a"
            " weighted sum may overflow, or a reward function may divide by zero. Set valid=False"
            " for rows that cannot be scored"
        )


def check_finite_outputs(
    model_outputs: ModelOutputs, mask: Tensor, *, error: type[KedgeError] = KedgeError
) -> None:
    """Name the model whose output for a token of ``mask`` is NaN or infinite."""
    outputs = {
        "the policy": model_outputs.logprobs,
        "the reference": model_outputs.ref_logprobs,
        "the value model": model_outputs.values,
    }
    for name, x in outputs.items():
        bad = [] if x is None else (mask & ~x.isfinite()).nonzero().tolist()
        if x is not None and bad:
            row, column = bad[0]
            raise error(
                f"{name} returns {float(x[row, column])} for token {column} of row {row}: its"
                " weights are not finite, or overflow in this precision; check the weights"
                " that it was loaded from, or lower the learning rate and resume"
            )


def _check_advantages(advantage_output: AdvantageOutput, algo: Algorithm, mask: Tensor) -> None:
    """Check shapes: fields of a wrong shape would silently be broadcast over tokens."""
    for field in fields(advantage_output):
        x = getattr(advantage_output, field.name)
        if field.name != "deviation" and x is not None and x.shape != mask.shape:
            raise ConfigError(
                f"{field.name} from compute_advantages of {algo.name} must have one number per"
                f" response token, shape {tuple(mask.shape)}, got {tuple(x.shape)}; expand a number"
                " per response with x[:, None] * inputs.rollout.loss_mask"
            )
    if not bool(advantage_output.advantages[mask].isfinite().all()):
        raise ConfigError(
            f"compute_advantages of {algo.name} returned advantages that are not finite"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """How an iteration passes over its experience: ``epochs`` times, ``minibatches`` steps each.

    Each pass is followed by ``value_passes`` - 1 passes that train the value model alone; their
    metrics are not logged.
    """

    epochs: int
    minibatches: int
    micro_rows: int  # rows of a forward and backward pass
    seed: int  # of the order of rows
    max_tokens: int | None = None  # of a forward and backward pass, instead of `micro_rows`
    value_passes: int = 1
    only_value: bool = False  # value warm-up: the policy does not train


def optimize(
    experience: Experience,
    learner: Learner,
    algo: Algorithm,
    plan: EpochPlan,
    control: StepControl | None = None,
) -> dict[str, float]:
    """Train on the experience as planned; returns metrics averaged over optimizer steps.

    Mini-batches are drawn from the rows of all ranks, so they do not depend on the world size;
    each rank processes an equal share of every mini-batch.
    """
    control = control or StepControl()
    shuffle = torch.Generator().manual_seed(plan.seed)
    share = slice(None)
    if plan.minibatches > 1 and learner.world_size > 1:  # rows of all ranks are mixed: ADR 8
        experience = learner.all_gather(experience)
        share = slice(learner.rank, None, learner.world_size)
    history: list[dict[str, float]] = []
    for number in range(plan.epochs * plan.value_passes):
        order = torch.randperm(len(experience), generator=shuffle)
        value_pass = number % plan.value_passes > 0
        for index in order.chunk(plan.minibatches):
            metrics = _optimizer_step(
                experience, index[share], learner, algo, plan, control, value_pass=value_pass
            )
            control.after_step()
            if value_pass:
                continue
            history.append(metrics)
            if control.limits.should_stop(metrics):
                return _mean_over_steps(history)
    return _mean_over_steps(history)


def _optimizer_step(
    experience: Experience,
    index: Tensor,
    learner: Learner,
    algo: Algorithm,
    plan: EpochPlan,
    control: StepControl,
    *,
    value_pass: bool,
) -> dict[str, float]:
    """One optimizer step on the rows ``index``, of the value model alone in a ``value_pass``."""
    step = micro_batches(
        experience,
        index,
        algo,
        plan.micro_rows,
        learner.all_reduce,
        max_tokens=plan.max_tokens,
        by_prompt=learner.shares_prompts,
    )
    # Where nothing trains, momentum and weight decay must not move weights, nor entropy 0 its
    # control: without a gradient there is no step.
    masks = experience.loss_mask, experience.value_mask
    tokens, values = learner.all_reduce(
        torch.stack([mask[index].sum().float() for mask in masks])
    ).tolist()
    empty, of_value = not tokens, algo.needs_values and bool(values)
    if value_pass:
        apply = control.apply_if(of_value, always)
        return learner.optimizer_step(
            step, algo.loss, only_value=True, skip_policy=True, should_apply=apply
        )
    coef = control.entropy_coef
    only_value = plan.only_value or (empty and algo.needs_values)
    trains = of_value if only_value else not empty
    metrics = learner.optimizer_step(
        step,
        add_entropy(algo, coef).loss if coef else algo.loss,
        only_value=only_value,
        should_apply=control.apply_if(trains, control.limits.should_apply),
    )
    if empty:
        return _NO_STEP | {n: x for n, x in metrics.items() if n not in _OF_TOKENS}
    return metrics if plan.only_value or not coef else {**metrics, "policy/entropy_coef": coef}


_NO_STEP = {"grad_norm": 0.0, "grad_norm/policy": 0.0}
_OF_TOKENS = ("val/ratio", "policy/entropy_avg", "policy/approxkl_avg", "policy/policykl_avg")


def _mean_over_steps(history: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of an iteration."""
    names = {name: None for step in history for name in step}
    kinds = {"_min": min, "_max": max}  # by the last four letters
    metrics = {
        name: kinds.get(name[-4:], fmean)([h[name] for h in history if name in h]) for name in names
    }
    if ratios := [h["val/ratio"] for h in history if "val/ratio" in h]:
        metrics["val/ratio_var"] = variance(ratios) if len(ratios) > 1 else 0.0
    return metrics
