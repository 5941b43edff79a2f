"""Rules on what is worth stopping for: about the settings, the first batch, and iterations.

A rule reads one record and returns a sentence, or None.  Checks of the first batch compare a number
that any correct setup satisfies; a sentence of theirs, with likely causes, ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from kedge.config.algorithms import RECIPES, ValueArguments
from kedge.config.base import OnPolicyConfig
from kedge.config.declare import default_of
from kedge.config.grpo import GRPOConfig
from kedge.config.ppo import PPOConfig
from kedge.loop.batch_sizes import BatchSizes
from kedge.loop.loop import Engine
from kedge.loop.stages import check_finite_outputs, make_experience, micro_batches
from kedge.math.masked import last_true, masked_mean, moments
from kedge.ops.products import backend
from kedge.records.errors import PreflightError
from kedge.records.protocols import RewardInfo, read_info
from kedge.records.types import Experience, ModelOutputs, RewardOutput, Rollout

T = TypeVar("T")
Rule = Callable[[T], str | None]


def rule(rules: list[Rule[T]]) -> Callable[[Rule[T]], Rule[T]]:
    """Decorator: adds a function to ``rules``, which are applied in the order of definition."""

    def add(check: Rule[T]) -> Rule[T]:
        rules.append(check)
        return check

    return add


def apply(rules: Sequence[Rule[T]], record: T) -> list[str]:
    """What the rules find, in their order."""
    return [text for check in rules if (text := check(record)) is not None]


# -- settings that rarely train well: better values, and their source ------------------------------
# Defaults that come from other libraries stay, so that a moved script trains as before.

LARGE = 300_000_000  # weights; smaller models take larger learning rates, and are for experiments
MEDIUM = 100_000_000  # trained weights; at 135M the default of 5e-5 clips a third of the tokens
HIGH_RATE = 2e-5
HIGHEST_RATE = 1e-2  # no transformer trains at a higher learning rate
SMALL_BATCH = 16  # responses per batch
WIDE_CLIP = 0.01
N_PLUS = "(Huang et al. 2024, arXiv:2403.17031)"


@dataclass(frozen=True)
class Settings:
    """What a run will do, known before it starts."""

    args: OnPolicyConfig
    policy: nn.Module
    sizes: BatchSizes
    plays: bool  # the policy plays in environments

    @cached_property
    def weights(self) -> int:
        """Weights of the policy."""
        return sum(p.numel() for p in self.policy.parameters())

    @cached_property
    def trained(self) -> int:
        """Trained weights of the policy; adapters have few, and take larger learning rates."""
        return sum(p.numel() for p in self.policy.parameters() if p.requires_grad)


SETTINGS: list[Rule[Settings]] = []


@rule(SETTINGS)
def slow_bf16(run: Settings) -> str | None:
    """bf16 on a processor without products of it."""
    on_cpu = run.args.bf16 and run.args.device.type == "cpu"
    return (backend().slow_bf16 or None) if on_cpu else None


@rule(SETTINGS)
def learning_rate(run: Settings) -> str | None:
    """One far from what trains such a model, or defaults for another kind of task."""
    args, trained = run.args, run.trained
    rate, large = args.learning_rate, trained >= LARGE
    if rate > HIGHEST_RATE:
        return (
            f"learning_rate={rate:g} is far too high for a language model, which"
            " diverges; typical: 1e-6 to 5e-5 for all weights, 1e-4 for adapters"
        )
    today, own = RECIPES["agent"], {f.name: default_of(f) for f in fields(args)}
    # value_source="auto" suits environments.
    names = [n for n in today if n in own and n != "value_source"]
    unset = [n for n in names if getattr(args, n) == own[n] != today[n]]
    if run.plays and large and isinstance(args, PPOConfig) and 2 * len(unset) > len(today):
        return (
            "defaults suit single responses rather than episodes; recommended:"
            f" {', '.join(f'{n}={today[n]}' for n in unset)}, which PPOConfig.recipe('agent') and"
            " --recipe agent set; docs/reference/defaults.md has the sources"
        )
    high = rate >= HIGH_RATE if large else rate > HIGH_RATE and trained >= MEDIUM
    if not high or args.num_ppo_epochs <= 1:
        return None
    return (
        f"learning_rate={rate:g} with num_ppo_epochs={args.num_ppo_epochs} is"
        f" high for {trained / 1e6:,.0f} million trained weights; recommended:"
        f" learning_rate={f'3e-6 {N_PLUS}' if large else '1e-5'}; `kedge init` writes today's"
        " values of every option"
    )


@rule(SETTINGS)
def incomplete_iteration(run: Settings) -> str | None:
    """The last iteration is filled up."""
    episodes, size = run.args.total_episodes, run.sizes.batch_size
    if episodes is None or not episodes % size or run.args.max_steps >= 1:
        return None
    return (
        f"total_episodes={episodes} is not a multiple of the {size} responses of an"
        f" iteration: the run has {math.ceil(episodes / size) * size}"
    )


@rule(SETTINGS)
def small_batch(run: Settings) -> str | None:
    """Gradients of a large model from few responses."""
    if run.sizes.batch_size > SMALL_BATCH or run.weights < LARGE:
        return None
    return (
        f"an iteration has {run.sizes.batch_size} responses, which makes gradients noisy;"
        f" recommended: 512, by a larger gradient_accumulation_steps {N_PLUS}"
    )


@rule(SETTINGS)
def wide_clip(run: Settings) -> str | None:
    """The ratio of a sequence is a mean, which moves less than that of a token."""
    args = run.args
    if not isinstance(args, GRPOConfig) or args.importance_sampling_level == "token":
        return None
    if args.epsilon < WIDE_CLIP:
        return None
    return (
        f"epsilon={args.epsilon:g} with importance_sampling_level='sequence' hardly ever clips,"
        " since the ratio is a mean over the response; recommended: epsilon=3e-4,"
        " epsilon_high=4e-4 (Zheng et al. 2025, arXiv:2507.18071)"
    )


@rule(SETTINGS)
def only_value_warmup(run: Settings) -> str | None:
    """The run ends before the policy trains."""
    warmup = run.args.value_warmup_steps if isinstance(run.args, ValueArguments) else 0
    if warmup < run.sizes.iterations:
        return None
    return (
        f"value_warmup_steps={warmup} covers all {run.sizes.iterations} iterations: the policy will"
        " not be trained"
    )


# -- the first batch, before anything trains on it -------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest accepted mean difference of log-probabilities, nats per token."""

    same_kernel: float = 1e-4  # same module and tokens, different padding and order
    engines: float = 1e-3  # between rollout engine and learner


UNFINISHED_HIGHER = 0.25  # share of the responses
LOW_END = -1.0  # standard deviations, the mean advantage of the tokens that end responses
LARGEST_SCORE = 1e18  # float32 holds the sum of hundreds of its squares
FULL_PRECISION = Tolerance()
LOW_PRECISION = Tolerance(same_kernel=3e-2, engines=5e-2)  # bf16, fp16 or tf32


@dataclass(frozen=True, kw_only=True)
class FirstBatch:
    """The first sampled and scored batch, and what computes with it; all ranks see their rows."""

    rollout: Rollout
    reward_output: RewardOutput
    loop: Engine
    fresh_reference: bool  # it has the policy's weights before any training
    length_option: str = "response_length"  # the config's limit of responses
    decode: Callable[[list[int]], str] | None = None  # text of stop tokens
    tolerance: Tolerance = FULL_PRECISION

    def compute(self, rollout: Rollout) -> ModelOutputs:
        """The learner's first pass, without gradient."""
        algorithm = self.loop.algorithm
        return self.loop.learner.compute_logprobs(
            rollout,
            values=algorithm.needs_values,
            reference=algorithm.needs_reference,
            full_kl=False,
        )

    @cached_property
    def mask(self) -> Tensor:
        """Bool [B, R]: tokens that are trained on."""
        return self.rollout.loss_mask & self.reward_output.valid[:, None]

    @cached_property
    def outputs(self) -> ModelOutputs:
        """The first pass over all rows; raises if it is not finite."""
        outputs = self.compute(replace(self.rollout, behavior_logprobs=None))
        check_finite_outputs(outputs, self.mask, error=PreflightError)
        return outputs

    @cached_property
    def experience(self) -> Experience:
        """The training data of all rows."""
        experience, _ = make_experience(
            replace(self.rollout, behavior_logprobs=None),
            self.reward_output,
            self.loop.learner,
            self.loop.algorithm,
            self.loop.kl.value,
        )
        return experience

    @cached_property
    def sample(self) -> Experience:
        """A few rows of training data."""
        return self.experience.rows(torch.arange(min(4, len(self.experience))))


CHECKS: list[Rule[FirstBatch]] = []
FIRST_BATCH: list[Rule[FirstBatch]] = []


def preflight(batch: FirstBatch) -> list[str]:
    """Check the first batch, without training; returns warnings that may be intended.

    Raises:
        PreflightError: a check failed; the message has the number and likely causes.
    """
    if not float(batch.loop.learner.all_reduce(batch.reward_output.valid.sum())):
        return ["no response of the first batch has a score, so the preflight checks were skipped"]
    for check in CHECKS:
        if (problem := check(batch)) is not None:
            raise PreflightError(f"preflight: {problem}")
    return apply(FIRST_BATCH, batch)


def _gap(a: Tensor, b: Tensor, mask: Tensor, limit: float) -> str | None:
    """How far ``a`` and ``b`` differ, if it is more than ``limit`` per token."""
    gap = float(torch.where(mask, (a - b).abs(), 0.0).sum() / mask.sum().clamp(min=1))
    return None if gap <= limit else f"{gap:.3g} nats per token (limit {limit:g})"


@rule(CHECKS)
def rewards_overflow(batch: FirstBatch) -> str | None:
    """Whitening squares rewards."""
    output = batch.reward_output
    large = output.valid & (output.scores.abs() > LARGEST_SCORE)
    if not large.any():
        return None
    row = int(large.nonzero()[0])
    return (
        f"|reward| must be at most {LARGEST_SCORE:g}, or squares of rewards overflow"
        f" float32; got {float(output.scores[row]):g} for row {row}. Scale the rewards down"
    )


@rule(CHECKS)
def stop_tokens_are_masked(batch: FirstBatch) -> str | None:
    """A policy without loss on its stop token never learns to stop."""
    rollout = batch.rollout
    ends = (rollout.response_mask.sum(1) - 1).clamp(min=0)
    trained = rollout.loss_mask.gather(1, ends[:, None]).squeeze(1)
    wrong = rollout.terminated & ~trained
    if not wrong.any():
        return None
    return (
        f"the stop token of row {int(wrong.nonzero()[0])} is not in the loss mask, so the policy"
        " could never learn to stop. The rollout engine's loss_mask must include the stop token,"
        " even if it equals the pad token"
    )


@rule(CHECKS)
def engine_and_learner_differ(batch: FirstBatch) -> str | None:
    """Both compute log-probabilities of the same tokens from equal weights."""
    sampled, learned = batch.rollout.behavior_logprobs, batch.outputs.logprobs
    if sampled is None or batch.loop.rollout_engine.logprob_kind != "sampled":
        return None
    gap = _gap(sampled, learned, batch.mask, batch.tolerance.engines)
    return gap and (
        f"log-probabilities of rollout engine and learner differ by {gap}. Likely causes: another"
        " temperature, a generation_config that affects sampling, other weights, or"
        " log-probabilities without the temperature"
    )


@rule(CHECKS)
def padding_or_order_matters(batch: FirstBatch) -> str | None:
    """Adding padding and reversing rows must change nothing."""
    rollout = batch.rollout
    index = torch.arange(min(3, len(rollout))).flip(0)
    width, few_rows = rollout.ids.shape[1], rollout.rows(index)
    wider = few_rows.prompts.widen(few_rows.prompts.ids.shape[1] + 3)
    padded = replace(few_rows.widen(width + 2), prompts=wider, behavior_logprobs=None)
    gap = _gap(
        batch.compute(padded).logprobs[:, :width],
        batch.outputs.logprobs[index],
        rollout.loss_mask[index],
        batch.tolerance.same_kernel,
    )
    return gap and (
        f"adding padding and reversing rows changes log-probabilities by {gap}. The model must not"
        " mix rows or see padding or later tokens; likely causes: attention that is not causal,"
        " batch statistics, or active dropout"
    )


@rule(CHECKS)
def reference_differs(batch: FirstBatch) -> str | None:
    """A reference that is the initial policy gives its log-probabilities."""
    reference = batch.outputs.ref_logprobs
    if not batch.fresh_reference or reference is None:
        return None
    gap = _gap(reference, batch.outputs.logprobs, batch.mask, batch.tolerance.same_kernel)
    return gap and (
        "before training, log-probabilities of policy and reference must be equal, but differ"
        f" by {gap}. Likely causes: active dropout, adapters that stay enabled for the reference,"
        " or another precision"
    )


@rule(CHECKS)
def passes_differ(batch: FirstBatch) -> str | None:
    """The training pass before the first step has ratio 1."""
    sample = batch.sample
    trained = batch.loop.learner.forward_no_grad(sample, values=False).logprobs
    limit = batch.tolerance.same_kernel
    gap = _gap(trained, sample.old_logprobs, sample.loss_mask, limit)
    return gap and (
        "before training, the log ratio of the training pass to the behavior policy must be 0, got"
        f" {gap}: clipping would act on noise. Likely causes: dropout in training mode, or another"
        " precision or temperature than in the first pass"
    )


@rule(CHECKS)
def loss_is_not_additive(batch: FirstBatch) -> str | None:
    """Micro-batch losses must sum to the loss of all rows, for any micro-batch size."""
    algorithm, forward = batch.loop.algorithm, batch.loop.learner.forward_no_grad
    rows = len(batch.sample)
    if rows < 2:
        return None
    # Terms of equal sign cannot cancel. Advantages of 0, as where the scores of a group are equal,
    # would leave a loss of rounding errors.
    advantages = batch.sample.advantages.abs().clamp(min=1)
    same_sign, totals = replace(batch.sample, advantages=advantages), []
    for size in (rows, -(-rows // 2)):
        parts = micro_batches(same_sign, torch.arange(rows), algorithm, size, lambda x: x)
        losses = [algorithm.loss(forward(part.rows), part).total for part in parts]
        totals.append([float(x.detach()) for x in losses])
    (whole,), halves = totals
    if not math.isfinite(whole) or not all(map(math.isfinite, halves)):
        return (
            f"the loss of {algorithm.name} is {whole:g} for {rows} rows whose largest"
            f" advantage is {float(advantages.max()):.3g}: it overflows, or divides by"
            " zero; scale the rewards down, or fix the loss"
        )
    if abs(whole - sum(halves)) <= 0.1 * sum(map(abs, halves)) + 1e-6:
        return None
    return (
        f"the loss of {algorithm.name} is {whole:.4g} for {rows} rows and"
        f" {sum(halves):.4g} for the same rows in two micro-batches, so gradients would depend"
        " on the micro-batch size. A loss must be a weighted sum: multiply by mb.token_weight"
        " (or row_weight, value_weight) and sum, without a mean"
    )


@rule(FIRST_BATCH)
def equal_scores(batch: FirstBatch) -> str | None:
    """A batch without differences has no advantages."""
    valid = batch.reward_output.valid
    scores = torch.where(valid, batch.reward_output.scores, 0.0).double()
    sums = torch.stack([valid.sum().double(), scores.sum(), (scores**2).sum()])
    n, s, ss = batch.loop.learner.all_reduce(sums).tolist()
    if n <= 1 or ss / n - (s / n) ** 2 > 1e-12:
        return None
    return (
        f"all {int(n)} scores of the first batch equal {s / n:g}: without differences there is"
        " nothing to learn; check the reward"
    )


@rule(FIRST_BATCH)
def nothing_ends(batch: FirstBatch) -> str | None:
    """No response reached what ends it."""
    rollout, sampling, decode = batch.rollout, batch.loop.sampling, batch.decode
    counts = torch.tensor([len(rollout), float(rollout.terminated.sum())], dtype=torch.float64)
    rows, finished = batch.loop.learner.all_reduce(counts).tolist()
    tokens = [f"{i} {decode([i])!r}" if decode else str(i) for i in sampling.stop_ids]
    kinds = {"stop token": tokens, "stop string": [*map(repr, sampling.stop_strings)]}
    ends = [
        f"{kind}{'s' if values[1:] else ''}: {', '.join(values[:8])}{', ...' if values[8:] else ''}"
        for kind, values in kinds.items()
        if values
    ]
    if finished or not rows or not ends or rollout.episodes is not None:
        return None
    return (
        f"none of the {int(rows)} responses terminated within {sampling.max_new_tokens} tokens"
        f" ({'; '.join(ends)}): raise {batch.length_option}, or set stop_token_ids to"
        " the tokens with which this model ends an answer"
    )


@rule(FIRST_BATCH)
def ending_is_punished(batch: FirstBatch) -> str | None:
    """Negative rewards and a value of 0 leave the last token with the lowest advantage.

    ``docs/records/reward_sign.md`` has what follows from it.
    """
    loop, rollout, output = batch.loop, batch.rollout, batch.reward_output
    episodes = rollout.episodes is not None  # they end for other reasons, too
    if episodes or not loop.algorithm.needs_values or loop.value_warmup_steps:
        return None
    advantages, all_reduce = batch.experience.advantages, loop.learner.all_reduce
    last = advantages.gather(1, last_true(batch.mask).clamp(min=0)[:, None]).squeeze(1)
    ended = rollout.terminated & output.valid & batch.mask.any(1)
    mean, std = moments(advantages, batch.mask, all_reduce=all_reduce)
    end, score = (masked_mean(x, ended, all_reduce=all_reduce) for x in (last, output.scores))
    deviations = float((end - mean) / std.clamp(min=1e-6))
    if deviations > LOW_END:
        return None
    return (
        "responses that end get lower rewards than the value model expects (mean"
        f" {score:.3g}), so their last tokens have low advantages ({deviations:.1f} standard"
        " deviations on average): PPO will first learn not to end. Set lam=1 or"
        " value_warmup_steps=3, or, if rewards are negative, add a constant to them"
    )


@rule(FIRST_BATCH)
def unfinished_score_higher(batch: FirstBatch) -> str | None:
    """Many finished responses would score higher cut in half; reward models rarely saw such texts.

    Only where models alone give the reward: functions expect whole responses.
    """
    rollout, reward_output, reward = batch.rollout, batch.reward_output, batch.loop.reward
    if rollout.episodes is not None or not read_info(reward, RewardInfo).only_models:
        return None
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
    sums = torch.stack([counts.sum(), higher.sum()]).double()
    n, more = batch.loop.learner.all_reduce(sums).tolist()
    if not n or more / n < UNFINISHED_HIGHER:
        return None
    return (
        f"{more / n:.0%} of the finished responses of the first batch would score higher cut in"
        " half: the reward model prefers unfinished texts, and the policy may learn not to end."
        " Replace their score: non_eos_penalty=True, with penalty_reward_value below the scores of"
        " finished responses"
    )


# -- iterations ------------------------------------------------------------------------------------

MUCH_CLIPPED, MUCH_MASKED, MOST_RATIO = 0.25, 0.05, 1.2  # limits after one iteration
MUCH_NOISE = 3  # iterations in a row in which the value is worse than the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """A finished iteration."""

    args: OnPolicyConfig
    last: Sequence[Mapping[str, float]]  # metrics of at most `MUCH_NOISE` iterations, itself last
    at_peak: bool  # the first of the policy at the full learning rate


ITERATION: list[Rule[Iteration]] = []


@rule(ITERATION)
def large_steps(iteration: Iteration) -> str | None:
    """The policy's first iteration already moved it out of the clip region.

    Masked tokens stay where they moved, even in the wrong direction, so the limit is lower.
    """
    args, metrics = iteration.args, iteration.last[-1]
    clipped, ratio = metrics.get("policy/clipfrac_avg", 0.0), metrics.get("val/ratio", 1.0)
    masked = isinstance(args, PPOConfig) and args.policy_loss == "mask"
    most = MUCH_MASKED if masked else MUCH_CLIPPED
    far = clipped >= most or not 1 / MOST_RATIO <= ratio <= MOST_RATIO
    if not iteration.at_peak or not far:
        return None
    return (
        f"the policy's first iteration {'masked' if masked else 'clipped'} {clipped:.0%} of"
        f" the tokens (mean ratio {ratio:.3g}): its steps are too large; lower"
        f" learning_rate={args.learning_rate:g}, or num_ppo_epochs={args.num_ppo_epochs}"
    )


@rule(ITERATION)
def value_is_noise(iteration: Iteration) -> str | None:
    """Advantages from a value worse than the mean are noise."""
    last = [(row.get("val/explained_variance", 0.0), row.get("lr", 0.0)) for row in iteration.last]
    if len(last) < MUCH_NOISE or not all(known < 0 < rate for known, rate in last):
        return None
    return (
        f"in {MUCH_NOISE} iterations in a row the value was worse than the mean return:"
        f" explained variance {last[-1][0]:.2f}; set value_warmup_steps, or use kedge value fit"
    )
