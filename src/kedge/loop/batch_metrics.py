"""Metrics of a batch: scores, lengths, KL and returns, over all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs
from kedge.loop.metrics import MetricAccumulator, reduce_metrics
from kedge.loop.stages import Terms
from kedge.math.advantage import group_count, group_std
from kedge.math.importance import importance_weights
from kedge.math.kl import k2, k3
from kedge.protocols import Learner, Total
from kedge.types import AdvantageOutput, Experience, Rollout


def batch_metrics(experience: Experience, terms: Terms, learner: Learner) -> dict[str, float]:
    """Metrics of a batch by name; every rank must call this.

    Args:
        experience: what is trained on.
        terms: what it was computed from.
        learner: provides the collectives and the version of the weights.
    """
    inputs, rollout, total = terms.inputs, terms.inputs.rollout, learner.total
    means = MetricAccumulator()
    _accumulate_staleness(means, terms, learner.version)
    _accumulate(means, inputs, terms.outputs, terms.kl_coef)
    metrics = means.read(total) | _lengths(rollout, inputs.reward_output.valid, total)
    metrics["objective/kl_coef"] = terms.kl_coef
    if terms.outputs.deviation is not None:
        metrics["val/raw_advantage_std"] = float(terms.outputs.deviation)
    _derive(metrics)
    known = rollout.token_versions >= 0
    metrics |= _token_ages(terms.age.clamp(min=0), known & experience.loss_mask, total)
    logged = reduce_metrics(inputs.reward_output.metrics, learner)
    metrics |= {f"log/{name}": mean for name, mean in logged.items()}
    if rollout.episodes is not None:
        metrics |= reduce_metrics(rollout.episodes.metrics, learner)
    return metrics


def _accumulate_staleness(means: MetricAccumulator, terms: Terms, version: int) -> None:
    """Accumulate the age of tokens, the correction, and gaps of log-probabilities."""
    rollout, current = terms.inputs.rollout, terms.logprobs
    mask, behavior = rollout.loss_mask, rollout.behavior_logprobs
    if terms.too_old is not None:
        means.mean("rollout/too_old_tokens", terms.too_old, mask)
    if terms.correction is not None and terms.weight is not None and behavior is not None:
        trained = mask if terms.too_old is None else mask & ~terms.too_old
        unbounded = replace(terms.correction, kind="truncate", high=float("inf"), low=0.0)
        raw = importance_weights(current, behavior, trained, unbounded)
        means.mean("rollout/correction_weight", terms.weight, trained)
        means.mean("rollout/correction_bounded", terms.weight != raw, trained)
    if behavior is not None and current is not behavior:
        gap, stale = (behavior - current).abs(), terms.age > 0
        means.mean("rollout/logprob_gap", gap, mask & ~stale)
        means.mean("rollout/stale_gap", gap, mask & stale)
    lag = (version - rollout.version).clamp(min=0)
    means.mean("rollout/lag", lag, rollout.version >= 0)


def _accumulate(
    means: MetricAccumulator, e: AdvantageInputs, outputs: AdvantageOutput, kl_coef: float
) -> None:
    """Accumulate the metrics of the valid rows."""
    valid, mask, models = e.reward_output.valid, e.rollout.loss_mask, e.model_outputs
    scores = e.reward_output.scores
    means.mean("objective/scores", scores, valid)
    means.mean("_scores_squared", scores.double() ** 2, valid)
    if e.reward_output.greedy_scores is not None:
        means.mean("objective/greedy_scores", e.reward_output.greedy_scores, valid)
    for name, part in e.reward_output.components.items():
        keep = valid & ~part.isnan()
        means.mean(f"rewards/{name}", part, keep)
        means.mean(f"_squared/{name}", part.double() ** 2, keep)
        means.sum(f"_count/{name}", keep)
    means.mean("objective/entropy", -(models.logprobs * mask).sum(1), valid)
    if outputs.kl is not None:
        kl = (outputs.kl * mask).sum(1)
        means.mean("objective/kl", kl, valid)
        means.mean("objective/non_score_reward", -kl_coef * kl, valid)
    if models.ref_logprobs is not None:
        for name, estimate in (("objective/kl2", k2), ("objective/kl3", k3)):
            means.mean(name, (estimate(models.logprobs, models.ref_logprobs) * mask).sum(1), valid)
    if outputs.returns is not None and models.values is not None:
        where = mask if outputs.value_mask is None else outputs.value_mask
        error = outputs.returns.double() - models.values
        means.mean("val/value_mean", models.values, where)
        means.mean("val/return_mean", outputs.returns, where)
        means.mean("_return_squared", outputs.returns.double() ** 2, where)
        means.mean("_error", error, where)
        means.mean("_error_squared", error**2, where)
    if outputs.loss_mask is not None:
        untrained = mask.any(1) & ~(mask & outputs.loss_mask).any(1)
        means.sum("rollout/untrained_rows", untrained)
    advantages = outputs.advantages.double()
    means.mean("_advantage", advantages, mask)
    means.mean("_advantage_squared", advantages**2, mask)
    group = e.rollout.prompts.group
    spread = group_std(scores, group, valid)
    means.mean("objective/uniform_groups", spread == 0, valid & (group_count(group, valid) > 1))
    means.sum("val/num_eos_tokens", e.rollout.terminated & valid)
    means.sum("rollout/dropped_rows", ~valid)
    means.sum("rollout/tokens", e.rollout.prompts.mask)
    means.sum("rollout/tokens", e.rollout.response_mask)
    means.mean("completions/truncated_ratio", ~e.rollout.terminated, valid)


def _derive(metrics: dict[str, float]) -> None:
    """Add metrics derived from other means, and remove the private inputs."""
    score = metrics["objective/scores"]
    metrics["objective/rlhf_reward"] = score + metrics.get("objective/non_score_reward", 0.0)
    metrics["objective/scores_std"] = max(metrics.pop("_scores_squared") - score**2, 0.0) ** 0.5
    for name in [n.removeprefix("_count/") for n in metrics if n.startswith("_count/")]:
        count, squared = metrics.pop(f"_count/{name}"), metrics.pop(f"_squared/{name}", 0.0)
        if count > 1:
            variance = squared - metrics[f"rewards/{name}"] ** 2
            metrics[f"rewards/{name}/std"] = (max(variance, 0.0) * count / (count - 1)) ** 0.5
    if "_advantage" in metrics:
        spread = metrics.pop("_advantage_squared") - metrics.pop("_advantage") ** 2
        metrics["val/advantage_std"] = max(spread, 0.0) ** 0.5
    if "_return_squared" in metrics:
        spread = metrics.pop("_return_squared") - metrics["val/return_mean"] ** 2
        residual = metrics.pop("_error_squared") - metrics.pop("_error") ** 2
        if spread > 0:
            metrics["val/explained_variance"] = 1 - residual / spread


def _lengths(rollout: Rollout, valid: Tensor, total: Total) -> dict[str, float]:
    """Mean, shortest and longest response over all ranks, from histograms.

    Both of all responses and of the terminated ones; tokens of environments do not count.
    """
    lengths = rollout.loss_mask.sum(1)
    size = _max_bound(rollout.ids.shape[1], total) + 1
    kinds = [
        torch.bincount(lengths[keep].cpu(), minlength=size)
        for keep in (valid, valid & rollout.terminated)
    ]
    both = total(torch.stack(kinds).double())
    metrics: dict[str, float] = {}
    for kind, histogram in zip(("length", "terminated_length"), both, strict=True):
        seen = histogram.nonzero().squeeze(1)
        if len(seen):
            mean = (histogram * torch.arange(size)).sum() / histogram.sum()
            metrics[f"completions/mean_{kind}"] = float(mean)
            metrics[f"completions/min_{kind}"] = float(seen[0])
            metrics[f"completions/max_{kind}"] = float(seen[-1])
    return metrics


def _token_ages(age: Tensor, keep: Tensor, total: Total) -> dict[str, float]:
    """The largest age of a token in iterations, and the share of tokens of each age.

    Args:
        age: int64 [B, R].
        keep: bool [B, R]; tokens that count.
        total: sums over ranks.
    """
    ages = age[keep].cpu()
    size = _max_bound(int(ages.max()) if len(ages) else 0, total) + 1
    histogram = total(torch.bincount(ages, minlength=size).double())
    present = histogram.nonzero().squeeze(1).tolist()
    if not present:
        return {}
    shares = {f"rollout/token_lag/{n}": float(histogram[n] / histogram.sum()) for n in present}
    return {"rollout/lag_max": float(present[-1])} | (shares if len(shares) > 1 else {})


def _max_bound(x: int, total: Total) -> int:
    """An upper bound of ``x`` over ranks: the sum."""
    return int(total(torch.tensor(float(x), dtype=torch.float64)))
