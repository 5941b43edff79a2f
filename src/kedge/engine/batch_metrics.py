"""Metrics of a batch: scores, lengths, KL and returns, over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs
from kedge.engine.metrics import Tally
from kedge.math.advantage import group_count, group_std
from kedge.math.kl import k2, k3
from kedge.protocols import Total
from kedge.types import AdvantageOutput, Rollout


def batch_metrics(
    e: AdvantageInputs, advantage_output: AdvantageOutput, kl_coef: float, tally: Tally
) -> dict[str, float]:
    """Metrics of a batch by name; every rank must call this.

    Args:
        e: the batch, its scores and the model outputs.
        advantage_output: advantages and returns.
        kl_coef: coefficient of the KL penalty.
        tally: accumulated metrics to reduce together with these.
    """
    _accumulate(tally, e, advantage_output, kl_coef)
    metrics = tally.read(e.total) | _lengths(e.rollout, e.reward_output.valid, e.total)
    metrics["objective/kl_coef"] = kl_coef
    _derive(metrics)
    return metrics


def _accumulate(
    tally: Tally, e: AdvantageInputs, advantage_output: AdvantageOutput, kl_coef: float
) -> None:
    """Accumulate the metrics of the valid rows."""
    valid, mask, outputs = e.reward_output.valid, e.rollout.loss_mask, e.model_outputs
    scores = e.reward_output.scores
    tally.mean("objective/scores", scores, valid)
    tally.mean("_scores_squared", scores.double() ** 2, valid)
    if e.reward_output.greedy_scores is not None:
        tally.mean("objective/greedy_scores", e.reward_output.greedy_scores, valid)
    for name, part in e.reward_output.components.items():
        keep = valid & ~part.isnan()
        tally.mean(f"rewards/{name}", part, keep)
        tally.mean(f"_squared/{name}", part.double() ** 2, keep)
        tally.sum(f"_count/{name}", keep)
    tally.mean("objective/entropy", -(outputs.logprobs * mask).sum(1), valid)
    if advantage_output.kl is not None:
        kl = (advantage_output.kl * mask).sum(1)
        tally.mean("objective/kl", kl, valid)
        tally.mean("objective/non_score_reward", -kl_coef * kl, valid)
    if outputs.ref_logprobs is not None:
        for name, estimate in (("objective/kl2", k2), ("objective/kl3", k3)):
            tally.mean(
                name, (estimate(outputs.logprobs, outputs.ref_logprobs) * mask).sum(1), valid
            )
    if advantage_output.returns is not None and outputs.values is not None:
        where = mask if advantage_output.value_mask is None else advantage_output.value_mask
        error = advantage_output.returns.double() - outputs.values
        tally.mean("val/value_mean", outputs.values, where)
        tally.mean("val/return_mean", advantage_output.returns, where)
        tally.mean("_return_squared", advantage_output.returns.double() ** 2, where)
        tally.mean("_error", error, where)
        tally.mean("_error_squared", error**2, where)
    if advantage_output.loss_mask is not None:
        untrained = mask.any(1) & ~(mask & advantage_output.loss_mask).any(1)
        tally.sum("rollout/untrained_rows", untrained)
    group = e.rollout.prompts.group
    spread = group_std(scores, group, valid)
    tally.mean("objective/uniform_groups", spread == 0, valid & (group_count(group, valid) > 1))
    tally.sum("val/num_eos_tokens", e.rollout.terminated & valid)
    tally.sum("rollout/dropped_rows", ~valid)
    tally.sum("rollout/tokens", e.rollout.prompts.mask)
    tally.sum("rollout/tokens", e.rollout.response_mask)
    tally.mean("completions/truncated_ratio", ~e.rollout.terminated, valid)


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
    if "_return_squared" in metrics:
        spread = metrics.pop("_return_squared") - metrics["val/return_mean"] ** 2
        residual = metrics.pop("_error_squared") - metrics.pop("_error") ** 2
        if spread > 0:
            metrics["val/explained_variance"] = 1 - residual / spread


def _lengths(rollout: Rollout, valid: Tensor, total: Total) -> dict[str, float]:
    """Mean, shortest and longest response over all ranks, from histograms.

    Both of all responses and of the terminated ones.
    """
    lengths = rollout.response_mask.sum(1)
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


def token_ages(age: Tensor, keep: Tensor, total: Total) -> dict[str, float]:
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
