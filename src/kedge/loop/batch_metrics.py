"""Metrics of a batch: scores, lengths, KL and returns, over all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs
from kedge.loop.metrics import MetricAccumulator, reduce_metrics
from kedge.loop.stages import Terms
from kedge.math.advantage import group_count
from kedge.math.kl import k2, k3
from kedge.math.ratios import Correction, importance_weights
from kedge.records.histogram import ratio_range
from kedge.records.protocols import AllReduce, Learner
from kedge.records.types import Experience, Rollout


def batch_metrics(experience: Experience, terms: Terms, learner: Learner) -> dict[str, float]:
    """Metrics of a batch by name; every rank must call this."""
    inputs, rollout, all_reduce = terms.inputs, terms.inputs.rollout, learner.all_reduce
    means = MetricAccumulator()
    _add_staleness(means, terms, learner.version)
    _add_rewards(means, inputs, terms.uniform)
    _add_training_data(means, terms)
    metrics = means.read(all_reduce) | _lengths(rollout, inputs.reward_output.valid, all_reduce)
    behavior = rollout.behavior_logprobs
    if behavior is not None and terms.logprobs is not behavior:
        mask = rollout.loss_mask if terms.too_old is None else rollout.loss_mask & ~terms.too_old
        raw = (terms.logprobs - behavior).masked_fill(~mask, torch.nan).flatten()
        ranks = {"rank": learner.rank, "world_size": learner.world_size}
        found = ratio_range(raw, all_reduce, **ranks)
        metrics |= {f"rollout/ratio_{name}": x for name, x in found.items()}
    penalty = metrics.get("objective/non_score_reward", 0.0)
    metrics["objective/rlhf_reward"] = metrics["objective/scores"] + penalty
    residual, spread = metrics.pop("_residual", 0.0), metrics.pop("_return_std", 0.0)
    if spread > 1e-5 * abs(metrics.get("val/return_mean", 0.0)):  # otherwise rounding error
        metrics["val/explained_variance"] = 1 - (residual / spread) ** 2
    metrics["objective/kl_coef"] = terms.kl_coef
    if terms.outputs.deviation is not None:
        metrics["val/raw_advantage_std"] = float(terms.outputs.deviation)
    known = rollout.token_versions >= 0
    metrics |= _token_ages(terms.age.clamp(min=0), known & experience.loss_mask, all_reduce)
    logged = reduce_metrics(inputs.reward_output.metrics, learner)
    metrics |= {f"log/{name}": mean for name, mean in logged.items()}
    if rollout.episodes is not None:
        metrics |= reduce_metrics(rollout.episodes.metrics, learner)
    return metrics


def _add_staleness(means: MetricAccumulator, terms: Terms, version: int) -> None:
    """Add the age of tokens, the correction, and gaps of log-probabilities."""
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
    lag = (version - rollout.policy_version).clamp(min=0)
    means.mean("rollout/lag", lag, rollout.policy_version >= 0)


def _add_rewards(means: MetricAccumulator, e: AdvantageInputs, uniform: Tensor) -> None:
    """Add scores, groups and counts of responses and tokens."""
    scores, valid, group = e.reward_output.scores, e.reward_output.valid, e.rollout.prompts.group
    means.mean("objective/scores", scores, valid, std="objective/scores_std")
    if e.reward_output.greedy_scores is not None:
        means.mean("objective/greedy_scores", e.reward_output.greedy_scores, valid)
    for name, part in e.reward_output.components.items():
        keep, std = valid & ~part.isnan(), f"rewards/{name}/std"
        means.mean(f"rewards/{name}", part, keep, std=std, unbiased=True)
    means.mean("objective/uniform_groups", uniform, valid & (group_count(group, valid) > 1))
    means.sum("val/num_eos_tokens", e.rollout.terminated & valid)
    means.sum("rollout/dropped_rows", ~valid)
    means.sum("rollout/tokens", e.rollout.prompts.mask)
    means.sum("rollout/tokens", e.rollout.response_mask)
    means.mean("completions/truncated_ratio", ~e.rollout.terminated, valid)


def _add_training_data(means: MetricAccumulator, terms: Terms) -> None:
    """Add entropy, KL, returns and advantages of the valid rows.

    Entropy and KL are means over samples of the policy whose log-probabilities they are made of.
    With a correction that is the learner's pi, so stale tokens of mu are weighted by pi / mu,
    bounded at 10.  Without it log(pi / ref) has the mean KL(mu | ref) - KL(mu | pi), which may be
    negative.
    """
    e, outputs = terms.inputs, terms.outputs
    valid, mask, models = e.reward_output.valid, e.rollout.loss_mask, e.model_outputs
    weight = mask.to(models.logprobs.dtype)  # [B, R]
    if terms.correction is not None and e.rollout.behavior_logprobs is not None:
        stale = mask & (terms.age > 0)
        ratio = Correction(high=10.0)
        ratios = importance_weights(terms.logprobs, e.rollout.behavior_logprobs, stale, ratio)
        weight = torch.where(stale, ratios, weight)
    means.mean("objective/entropy", -(models.logprobs * weight).sum(1), valid)
    if outputs.kl is not None:
        kl = (outputs.kl * weight).sum(1)
        means.mean("objective/kl", kl, valid)
        means.mean("objective/non_score_reward", -terms.kl_coef * kl, valid)
    if models.ref_logprobs is not None:
        for name, estimate in (("objective/kl2", k2), ("objective/kl3", k3)):
            sampled = estimate(models.logprobs, models.ref_logprobs) * weight
            means.mean(name, sampled.sum(1), valid)
    if outputs.returns is not None and models.values is not None:
        where = mask if outputs.value_mask is None else outputs.value_mask
        means.mean("val/value_mean", models.values, where)
        means.mean("val/return_mean", outputs.returns, where, std="_return_std")
        means.mean("_error", outputs.returns.double() - models.values, where, std="_residual")
    if outputs.loss_mask is not None:
        untrained = mask.any(1) & ~(mask & outputs.loss_mask).any(1)
        means.sum("rollout/untrained_rows", untrained)
    means.mean("_advantage", outputs.advantages, mask, std="val/advantage_std")


def _lengths(rollout: Rollout, valid: Tensor, all_reduce: AllReduce) -> dict[str, float]:
    """Mean, shortest and longest response over all ranks, from histograms.

    For all responses, and for terminated ones; tokens of environments do not count.
    """
    lengths = rollout.loss_mask.sum(1)
    size = _max_bound(rollout.ids.shape[1], all_reduce) + 1
    kinds = [
        torch.bincount(lengths[keep].cpu(), minlength=size)
        for keep in (valid, valid & rollout.terminated)
    ]
    both = all_reduce(torch.stack(kinds).double())
    metrics: dict[str, float] = {}
    for kind, histogram in zip(("length", "terminated_length"), both, strict=True):
        seen = histogram.nonzero().squeeze(1)
        if len(seen):
            mean = (histogram * torch.arange(size)).sum() / histogram.sum()
            metrics[f"completions/mean_{kind}"] = float(mean)
            metrics[f"completions/min_{kind}"] = float(seen[0])
            metrics[f"completions/max_{kind}"] = float(seen[-1])
    return metrics


def _token_ages(age: Tensor, keep: Tensor, all_reduce: AllReduce) -> dict[str, float]:
    """Largest ``age`` [B, R] in iterations, and the share of tokens ``keep`` [B, R] per age."""
    ages = age[keep].cpu()
    size = _max_bound(int(ages.max()) if len(ages) else 0, all_reduce) + 1
    histogram = all_reduce(torch.bincount(ages, minlength=size).double())
    present = histogram.nonzero().squeeze(1).tolist()
    if not present:
        return {}
    shares = {f"rollout/token_lag/{n}": float(histogram[n] / histogram.sum()) for n in present}
    return {"rollout/lag_max": float(present[-1])} | (shares if len(shares) > 1 else {})


def _max_bound(x: int, all_reduce: AllReduce) -> int:
    """An upper bound of the maximum of ``x`` over ranks: the sum."""
    return int(all_reduce(torch.tensor(float(x), dtype=torch.float64)))
