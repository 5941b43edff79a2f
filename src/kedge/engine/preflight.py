"""One look at the first batch before the first update: would training be right?

Every check states a number that must hold on the first batch of any correct set-up, and the
likely cause when it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge.algorithms.base import Algorithm
from kedge.engine.stages import cut, make_experience
from kedge.errors import PreflightError
from kedge.protocols import Learner, RolloutEngine
from kedge.types import Experience, ModelOutputs, RewardOutput, Rollout, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest accepted mean difference of log-probabilities, nats per token."""

    same_kernel: float = 1e-4  # the same module on the same tokens, laid out differently
    engines: float = 1e-3  # sampler against learner


LARGEST_SCORE = 1e18  # the sum of some hundred of its squares is finite in float32
FULL_PRECISION = Tolerance()
LOW_PRECISION = Tolerance(same_kernel=3e-2, engines=5e-2)  # bf16 or fp16 autocast


def preflight(
    rollout: Rollout,
    reward_output: RewardOutput,
    *,
    engine: RolloutEngine,
    learner: Learner,
    algorithm: Algorithm,
    kl_coef: float,
    fresh_reference: bool,
    sampling: Sampling,
    length_option: str = "response_length",
    tolerance: Tolerance = FULL_PRECISION,
) -> list[str]:
    """Check one sampled and scored batch.  Nothing is trained.

    Args:
        rollout: the batch that the first update will use.
        reward_output: its scores.
        engine: what sampled it.
        learner: the models.
        algorithm: the algorithm.
        kl_coef: coefficient of the KL penalty.
        fresh_reference: the reference was made from the policy's weights and nothing has trained.
        sampling: how the batch was sampled, and where its responses end.
        length_option: what the config calls the length limit of a response.
        tolerance: accepted differences.

    Returns:
        Warnings: things that are unusual but may be meant.

    Raises:
        PreflightError: a check failed; the message holds its number and the likely cause.
    """
    if not float(learner.total(reward_output.valid.sum())):
        return ["no response of the first batch has a score, so nothing was checked"]
    _rewards_are_finite(reward_output)
    _stop_token_is_trained(rollout)
    note = _annotate(learner, algorithm, replace(rollout, behavior_logprobs=None))
    mask = rollout.loss_mask & reward_output.valid[:, None]
    _models_are_finite(note, mask)
    _engine_agrees(engine, rollout, note, mask, tolerance.engines)
    _padding_does_not_matter(learner, algorithm, rollout, note, tolerance.same_kernel)
    if fresh_reference and note.ref_logprobs is not None:
        _reference_is_fresh(note, mask, tolerance.same_kernel)
    experience, _ = make_experience(
        replace(rollout, behavior_logprobs=None), reward_output, learner, algorithm, kl_coef
    )
    few = experience.rows(torch.arange(min(4, len(experience))))
    _ratio_is_one(
        learner.forward_no_grad(few).logprobs,
        few.old_logprobs,
        few.loss_mask,
        tolerance.same_kernel,
    )
    _losses_add_up(learner, algorithm, few)
    return _unusual(rollout, reward_output, learner, sampling, length_option)


def _annotate(learner: Learner, algorithm: Algorithm, rollout: Rollout) -> ModelOutputs:
    return learner.compute_logprobs(
        rollout,
        values=algorithm.needs_values,
        reference=algorithm.needs_reference,
        full_kl=False,
    )


def _gap(a: Tensor, b: Tensor, mask: Tensor) -> float:
    return float(torch.where(mask, (a - b).abs(), 0.0).sum() / mask.sum().clamp(min=1))


def _rewards_are_finite(reward_output: RewardOutput) -> None:
    bad = reward_output.valid & ~reward_output.scores.isfinite()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise PreflightError(
            f"preflight: the score of row {row} is {float(reward_output.scores[row])}; a reward"
            f" must be"
            " a finite number. A reward model in float16 may overflow; a reward function may divide"
            " by zero"
        )
    large = reward_output.valid & (reward_output.scores.abs() > LARGEST_SCORE)
    if large.any():
        row = int(large.nonzero()[0])
        raise PreflightError(
            f"preflight: the score of row {row} is {float(reward_output.scores[row]):g}, and above"
            f" {LARGEST_SCORE:g} squares of scores overflow float32; scale the rewards down"
        )


def _stop_token_is_trained(rollout: Rollout) -> None:
    ends = (rollout.response_mask.sum(1) - 1).clamp(min=0)
    trained = rollout.loss_mask.gather(1, ends[:, None]).squeeze(1)
    wrong = rollout.terminated & ~trained
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise PreflightError(
            f"preflight: row {row} ended by a stop token that takes no part in the loss, so the"
            " policy could never learn to stop. The engine's mask must include the stop token, also"
            " when it equals the pad token"
        )


def _models_are_finite(note: ModelOutputs, mask: Tensor) -> None:
    said = {
        "the policy": note.logprobs,
        "the reference": note.ref_logprobs,
        "the value model": note.values,
    }
    for name, x in said.items():
        if x is None:
            continue
        bad = mask & ~x.isfinite()
        if bad.any():
            row, slot = (int(i) for i in bad.nonzero()[0])
            raise PreflightError(
                f"preflight: {name} gives {float(x[row, slot])} for token {slot} of row {row}: its"
                " weights are not finite, or overflow at this precision"
            )


def _engine_agrees(
    engine: RolloutEngine, rollout: Rollout, note: ModelOutputs, mask: Tensor, limit: float
) -> None:
    if rollout.behavior_logprobs is None or engine.logprobs != "sampled":
        return
    gap = _gap(rollout.behavior_logprobs, note.logprobs, mask)
    if not gap <= limit:
        raise PreflightError(
            f"preflight: sampler and learner disagree by {gap:.3g} nats per token on the sampled"
            f" tokens (limit {limit:g}). Likely causes: another temperature, a generation_config"
            " that leaks into sampling, other weights, or log-probabilities of the unscaled"
            " distribution"
        )


def _padding_does_not_matter(
    learner: Learner, algorithm: Algorithm, rollout: Rollout, note: ModelOutputs, limit: float
) -> None:
    index = torch.arange(min(3, len(rollout))).flip(0)
    prompts = rollout.prompts
    padded = Rollout(
        prompts=replace(
            prompts,
            ids=pad(prompts.ids[index], (3, 0)),
            mask=pad(prompts.mask[index], (3, 0)),
            group=prompts.group[index],
            row=prompts.row[index],
            columns={},
        ),
        ids=pad(rollout.ids[index], (0, 2)),
        loss_mask=pad(rollout.loss_mask[index], (0, 2)),
        response_mask=pad(rollout.response_mask[index], (0, 2)),
        terminated=rollout.terminated[index],
        version=rollout.version[index],
        allowed_tokens=None
        if rollout.allowed_tokens is None
        else pad(rollout.allowed_tokens[index], (0, 0, 0, 2), value=-1),
    )
    width = rollout.ids.shape[1]
    again = _annotate(learner, algorithm, padded)
    gap = _gap(again.logprobs[:, :width], note.logprobs[index], rollout.loss_mask[index])
    if not gap <= limit:
        raise PreflightError(
            f"preflight: adding padding and reversing rows changes log-probabilities by {gap:.3g}"
            f" nats per token (limit {limit:g}). The model mixes tokens or rows that it must not:"
            " attention that is not causal, batch statistics, or active dropout"
        )


def _reference_is_fresh(note: ModelOutputs, mask: Tensor, limit: float) -> None:
    assert note.ref_logprobs is not None
    gap = _gap(note.ref_logprobs, note.logprobs, mask)
    if not gap <= limit:
        raise PreflightError(
            f"preflight: before any training the policy is {gap:.3g} nats per token away from a"
            f" reference that was made from it (limit {limit:g}). Likely causes: active dropout,"
            " adapters that are not switched off for the reference, or another precision"
        )


def _ratio_is_one(new: Tensor, old: Tensor, mask: Tensor, limit: float) -> None:
    gap = _gap(new, old, mask)
    if not gap <= limit:
        raise PreflightError(
            f"preflight: before any training the log ratio of the training pass to the policy that"
            f" sampled is {gap:.3g} nats per token, not 0 (limit {limit:g}): the ratio starts away"
            " from 1 and clipping acts on noise. Likely causes: dropout in training mode, or"
            " another precision or temperature than in the first pass"
        )


def _losses_add_up(learner: Learner, algorithm: Algorithm, few: Experience) -> None:
    """Rows together must lose what they lose apart, or gradients depend on how a step is cut."""
    rows = len(few)
    if rows < 2:
        return
    same_sign = replace(few, advantages=few.advantages.abs())  # so that nothing cancels
    totals = []
    for size in (rows, -(-rows // 2)):
        parts = cut(same_sign, torch.arange(rows), algorithm, size, lambda x: x)
        losses = [algorithm.loss(learner.forward_no_grad(part.rows), part).total for part in parts]
        totals.append([float(x.detach()) for x in losses])
    (whole,), apart = totals
    if not math.isfinite(whole) or not all(map(math.isfinite, apart)):
        raise PreflightError(
            f"preflight: the loss of {algorithm.name} is {whole:g} for {rows} rows whose largest"
            f" advantage is {float(same_sign.advantages.max()):.3g}: it overflows, or divides by"
            " zero; scale large rewards down, or fix the loss"
        )
    if not abs(whole - sum(apart)) <= 0.1 * sum(map(abs, apart)) + 1e-6:
        raise PreflightError(
            f"preflight: the loss of {algorithm.name} is {whole:.4g} for {rows} rows and"
            f" {sum(apart):.4g} for the same rows in two parts, so gradients would depend on the"
            " micro-batch size. A loss is a sum: multiply by mb.token_weight (or row_weight,"
            " value_weight) and sum, without a mean"
        )


def _unusual(
    rollout: Rollout,
    reward_output: RewardOutput,
    learner: Learner,
    sampling: Sampling,
    length_option: str,
) -> list[str]:
    scores = torch.where(reward_output.valid, reward_output.scores, 0.0).double()
    n, s, ss = learner.total(
        torch.stack([reward_output.valid.sum().double(), scores.sum(), (scores**2).sum()])
    ).tolist()
    warnings = []
    if n > 1 and ss / n - (s / n) ** 2 <= 1e-12:
        warnings.append(
            f"all {int(n)} scores of the first batch equal {s / n:g}: without differences there is"
            " nothing to learn"
        )
    rows, finished = learner.total(
        torch.tensor([float(len(rollout)), float(rollout.terminated.sum())], dtype=torch.float64)
    ).tolist()
    ends = [*map(str, sampling.stop_ids), *map(repr, sampling.stop_strings)]
    if finished == 0 and rows and ends:
        shown = ", ".join(ends[:8]) + (", ..." if len(ends) > 8 else "")
        warnings.append(
            f"none of the {int(rows)} responses ended by itself within {sampling.max_new_tokens}"
            f" tokens (what ends one: {shown}): raise {length_option}, or set stop_token_ids to the"
            " tokens with which this model ends an answer"
        )
    return warnings
