"""Checks of the first batch before the first iteration trains on it.

Each check compares a number that any correct setup satisfies, and names likely causes if it
fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kedge.algorithms.base import Algorithm
from kedge.loop.stages import check_finite_outputs, make_experience, micro_batches
from kedge.records.errors import PreflightError
from kedge.records.protocols import Learner, RewardSource, RolloutEngine
from kedge.records.types import Experience, RewardOutput, Rollout, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest accepted mean difference of log-probabilities, nats per token."""

    same_kernel: float = 1e-4  # same module and tokens, different padding and order
    engines: float = 1e-3  # between rollout engine and learner


UNFINISHED_HIGHER = 0.25  # share of the responses
LARGEST_SCORE = 1e18  # float32 holds the sum of hundreds of its squares
FULL_PRECISION = Tolerance()
LOW_PRECISION = Tolerance(same_kernel=3e-2, engines=5e-2)  # bf16, fp16 or tf32


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
    decode: Callable[[list[int]], str] | None = None,
    tolerance: Tolerance = FULL_PRECISION,
    reward: RewardSource | None = None,
) -> list[str]:
    """Check one sampled and scored batch, without training; returns warnings that may be intended.

    ``fresh_reference``: it has the policy's weights before any training.  ``length_option`` names
    the config's limit of responses, ``decode`` gives the text of stop tokens.  ``reward`` scores
    the same responses cut short, if only models give the reward; these rarely saw unfinished texts.

    Raises:
        PreflightError: a check failed; the message has the number and likely causes.
    """
    if not float(learner.all_reduce(reward_output.valid.sum())):
        return ["no response of the first batch has a score, so the preflight checks were skipped"]
    _check_rewards(reward_output)
    _check_stop_token(rollout)
    compute = partial(
        learner.compute_logprobs,
        values=algorithm.needs_values,
        reference=algorithm.needs_reference,
        full_kl=False,
    )
    model_outputs = compute(replace(rollout, behavior_logprobs=None))
    mask = rollout.loss_mask & reward_output.valid[:, None]
    check_finite_outputs(model_outputs, mask, error=PreflightError)
    if rollout.behavior_logprobs is not None and engine.logprob_kind == "sampled":
        _check_gap(
            rollout.behavior_logprobs,
            model_outputs.logprobs,
            mask,
            tolerance.engines,
            "log-probabilities of rollout engine and learner differ by {}. Likely causes: another"
            " temperature, a generation_config that affects sampling, other weights, or"
            " log-probabilities without the temperature",
        )
    # Adding padding and reversing rows must change nothing.
    index = torch.arange(min(3, len(rollout))).flip(0)
    width, few_rows = rollout.ids.shape[1], rollout.rows(index)
    wider = few_rows.prompts.widen(few_rows.prompts.ids.shape[1] + 3)
    padded = replace(few_rows.widen(width + 2), prompts=wider, behavior_logprobs=None)
    _check_gap(
        compute(padded).logprobs[:, :width],
        model_outputs.logprobs[index],
        rollout.loss_mask[index],
        tolerance.same_kernel,
        "adding padding and reversing rows changes log-probabilities by {}. The model must not mix"
        " rows or see padding or later tokens; likely causes: attention that is not causal, batch"
        " statistics, or active dropout",
    )
    if fresh_reference and model_outputs.ref_logprobs is not None:
        _check_gap(
            model_outputs.ref_logprobs,
            model_outputs.logprobs,
            mask,
            tolerance.same_kernel,
            "before training, log-probabilities of policy and reference must be equal, but differ"
            " by {}. Likely causes: active dropout, adapters that stay enabled for the reference,"
            " or another precision",
        )
    experience, _ = make_experience(
        replace(rollout, behavior_logprobs=None), reward_output, learner, algorithm, kl_coef
    )
    sample = experience.rows(torch.arange(min(4, len(experience))))
    _check_gap(
        learner.forward_no_grad(sample, values=False).logprobs,
        sample.old_logprobs,
        sample.loss_mask,
        tolerance.same_kernel,
        "before training, the log ratio of the training pass to the behavior policy must be 0, got"
        " {}: clipping would act on noise. Likely causes: dropout in training mode, or another"
        " precision or temperature than in the first pass",
    )
    _check_loss_is_additive(learner, algorithm, sample)
    warnings = _find_warnings(rollout, reward_output, learner, sampling, length_option, decode)
    return [*warnings, *_find_unfinished(rollout, reward_output, learner, reward)]


def _check_gap(a: Tensor, b: Tensor, mask: Tensor, limit: float, problem: str) -> None:
    """Raise ``problem``, in which {} is the gap, if ``a`` and ``b`` differ by more per token."""
    gap = float(torch.where(mask, (a - b).abs(), 0.0).sum() / mask.sum().clamp(min=1))
    if not gap <= limit:
        text = problem.format(f"{gap:.3g} nats per token (limit {limit:g})")
        raise PreflightError(f"preflight: {text}")


def _check_rewards(reward_output: RewardOutput) -> None:
    large = reward_output.valid & (reward_output.scores.abs() > LARGEST_SCORE)
    if large.any():
        row = int(large.nonzero()[0])
        raise PreflightError(
            f"preflight: |reward| must be at most {LARGEST_SCORE:g}, or squares of rewards overflow"
            f" float32; got {float(reward_output.scores[row]):g} for row {row}. Scale the rewards"
            " down"
        )


def _check_stop_token(rollout: Rollout) -> None:
    ends = (rollout.response_mask.sum(1) - 1).clamp(min=0)
    trained = rollout.loss_mask.gather(1, ends[:, None]).squeeze(1)
    wrong = rollout.terminated & ~trained
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise PreflightError(
            f"preflight: the stop token of row {row} is not in the loss mask, so the policy could"
            " never learn to stop. The rollout engine's loss_mask must include the stop token, even"
            " if it equals the pad token"
        )


def _check_loss_is_additive(learner: Learner, algorithm: Algorithm, sample: Experience) -> None:
    """Micro-batch losses must sum to the loss of all rows, for any micro-batch size."""
    rows = len(sample)
    if rows < 2:
        return
    # Terms of equal sign cannot cancel. Advantages of 0, as where the scores of a group are equal,
    # would leave a loss of rounding errors.
    same_sign = replace(sample, advantages=sample.advantages.abs().clamp(min=1))
    totals = []
    for size in (rows, -(-rows // 2)):
        parts = micro_batches(same_sign, torch.arange(rows), algorithm, size, lambda x: x)
        losses = [algorithm.loss(learner.forward_no_grad(part.rows), part).total for part in parts]
        totals.append([float(x.detach()) for x in losses])
    (whole,), halves = totals
    if not math.isfinite(whole) or not all(map(math.isfinite, halves)):
        raise PreflightError(
            f"preflight: the loss of {algorithm.name} is {whole:g} for {rows} rows whose largest"
            f" advantage is {float(same_sign.advantages.max()):.3g}: it overflows, or divides by"
            " zero; scale the rewards down, or fix the loss"
        )
    if not abs(whole - sum(halves)) <= 0.1 * sum(map(abs, halves)) + 1e-6:
        raise PreflightError(
            f"preflight: the loss of {algorithm.name} is {whole:.4g} for {rows} rows and"
            f" {sum(halves):.4g} for the same rows in two micro-batches, so gradients would depend"
            " on the micro-batch size. A loss must be a weighted sum: multiply by mb.token_weight"
            " (or row_weight, value_weight) and sum, without a mean"
        )


def _find_warnings(
    rollout: Rollout,
    reward_output: RewardOutput,
    learner: Learner,
    sampling: Sampling,
    length_option: str,
    decode: Callable[[list[int]], str] | None = None,
) -> list[str]:
    scores = torch.where(reward_output.valid, reward_output.scores, 0.0).double()
    n, s, ss = learner.all_reduce(
        torch.stack([reward_output.valid.sum().double(), scores.sum(), (scores**2).sum()])
    ).tolist()
    warnings = []
    if n > 1 and ss / n - (s / n) ** 2 <= 1e-12:
        warnings.append(
            f"all {int(n)} scores of the first batch equal {s / n:g}: without differences there is"
            " nothing to learn; check the reward"
        )
    rows, finished = learner.all_reduce(
        torch.tensor([float(len(rollout)), float(rollout.terminated.sum())], dtype=torch.float64)
    ).tolist()
    tokens = [f"{i} {decode([i])!r}" if decode else str(i) for i in sampling.stop_ids]
    kinds = {"stop token": tokens, "stop string": [*map(repr, sampling.stop_strings)]}
    ends = [
        f"{kind}{'s' if values[1:] else ''}: {', '.join(values[:8])}{', ...' if values[8:] else ''}"
        for kind, values in kinds.items()
        if values
    ]
    if finished == 0 and rows and ends and rollout.episodes is None:
        warnings.append(
            f"none of the {int(rows)} responses terminated within {sampling.max_new_tokens} tokens"
            f" ({'; '.join(ends)}): raise {length_option}, or set stop_token_ids to"
            " the tokens with which this model ends an answer"
        )
    return warnings


def _find_unfinished(
    rollout: Rollout, reward_output: RewardOutput, learner: Learner, reward: RewardSource | None
) -> list[str]:
    """A warning if many finished responses would score higher when cut in half."""
    if reward is None or rollout.episodes is not None:
        return []
    lengths = rollout.response_mask.sum(1)
    first_half = torch.arange(rollout.ids.shape[1], device=lengths.device) < lengths[:, None] // 2
    cut = replace(
        rollout,
        loss_mask=rollout.loss_mask & first_half,
        response_mask=rollout.response_mask & first_half,
        terminated=torch.zeros_like(rollout.terminated),
        behavior_logprobs=None,
        allowed_tokens=None,
    )
    output = reward.score(cut)
    counts = rollout.terminated & reward_output.valid & output.valid & (lengths > 1)
    higher = counts & (output.scores > reward_output.scores)
    n, more = learner.all_reduce(torch.stack([counts.sum(), higher.sum()]).double()).tolist()
    if not n or more / n < UNFINISHED_HIGHER:
        return []
    return [
        f"{more / n:.0%} of the finished responses of the first batch would score higher cut in"
        " half: the reward model prefers unfinished texts, and the policy may learn not to end."
        " Replace their score: non_eos_penalty=True, with penalty_reward_value below the scores of"
        " finished responses"
    ]
