"""What a batch was like: the metrics of its scores, lengths, KL and returns, over all ranks."""

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
    """Metrics of a batch by name; every rank calls this.

    Args:
        e: the batch, its scores, and what the models think of it.
        advantage_output: what the algorithm made of that.
        kl_coef: coefficient of the KL penalty.
        tally: what was counted before, and is read with the rest.
    """
    _describe(tally, e, advantage_output, kl_coef)
    metrics = tally.read(e.total) | _lengths(e.rollout, e.reward_output.valid, e.total)
    metrics["objective/kl_coef"] = kl_coef
    _derive(metrics)
    return metrics


def _describe(
    tally: Tally, e: AdvantageInputs, advantage_output: AdvantageOutput, kl_coef: float
) -> None:
    """What the batch was like, rows that could not be scored left out."""
    valid, mask, note = e.reward_output.valid, e.rollout.loss_mask, e.model_outputs
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
    tally.mean("objective/entropy", -(note.logprobs * mask).sum(1), valid)
    if advantage_output.kl is not None:
        kl = (advantage_output.kl * mask).sum(1)
        tally.mean("objective/kl", kl, valid)
        tally.mean("objective/non_score_reward", -kl_coef * kl, valid)
    if note.ref_logprobs is not None:
        for name, estimate in (("objective/kl2", k2), ("objective/kl3", k3)):
            tally.mean(name, (estimate(note.logprobs, note.ref_logprobs) * mask).sum(1), valid)
    if advantage_output.returns is not None and note.values is not None:
        where = mask if advantage_output.value_mask is None else advantage_output.value_mask
        error = advantage_output.returns.double() - note.values
        tally.mean("val/value_mean", note.values, where)
        tally.mean("val/return_mean", advantage_output.returns, where)
        tally.mean("_return_squared", advantage_output.returns.double() ** 2, where)
        tally.mean("_error", error, where)
        tally.mean("_error_squared", error**2, where)
    if advantage_output.loss_mask is not None:
        left_out = mask.any(1) & ~(mask & advantage_output.loss_mask).any(1)
        tally.sum("rollout/untrained_rows", left_out)
    group = e.rollout.prompts.group
    spread = group_std(scores, group, valid)
    tally.mean("objective/uniform_groups", spread == 0, valid & (group_count(group, valid) > 1))
    tally.sum("val/num_eos_tokens", e.rollout.terminated & valid)
    tally.sum("rollout/dropped_rows", ~valid)
    tally.sum("rollout/tokens", e.rollout.prompts.mask)
    tally.sum("rollout/tokens", e.rollout.response_mask)
    tally.mean("completions/truncated_ratio", ~e.rollout.terminated, valid)


def _derive(metrics: dict[str, float]) -> None:
    """Metrics that are functions of other means; the private inputs are removed."""
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
        left = metrics.pop("_error_squared") - metrics.pop("_error") ** 2
        if spread > 0:
            metrics["val/explained_variance"] = 1 - left / spread


def _lengths(rollout: Rollout, valid: Tensor, total: Total) -> dict[str, float]:
    """Mean, shortest and longest response over all ranks, from histograms.

    Of all responses, and of those that ended by themselves.
    """
    lengths = rollout.response_mask.sum(1)
    size = _bound(rollout.ids.shape[1], total) + 1
    kinds = [
        torch.bincount(lengths[keep].cpu(), minlength=size)
        for keep in (valid, valid & rollout.terminated)
    ]
    both = total(torch.stack(kinds).double())
    found: dict[str, float] = {}
    for kind, histogram in zip(("length", "terminated_length"), both, strict=True):
        seen = histogram.nonzero().squeeze(1)
        if len(seen):
            mean = (histogram * torch.arange(size)).sum() / histogram.sum()
            found[f"completions/mean_{kind}"] = float(mean)
            found[f"completions/min_{kind}"] = float(seen[0])
            found[f"completions/max_{kind}"] = float(seen[-1])
    return found


def _bound(x: int, total: Total) -> int:
    """At least the largest ``x`` of any rank: their sum."""
    return int(total(torch.tensor(float(x), dtype=torch.float64)))
