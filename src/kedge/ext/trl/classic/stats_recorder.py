"""Records intermediate results of an iteration for its statistics."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs, Algorithm
from kedge.math.masked import masked_mean, moments
from kedge.records.protocols import Hook
from kedge.records.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require

Total = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class OptimizerStep:
    """Sums over the micro-batches of one optimizer step, and per-token values.

    Loss weights sum to 1 over the step, so weighted sums are means over its tokens.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)  # float64 scalars
    # float32 [3, b R]: ratio, advantage, and 1 where a token is trained; on the learner's device
    tokens: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def add(self, new: PolicyOutput, mb: MicroBatch, loss: Loss) -> None:
        """Add one micro-batch."""
        x, w, v = mb.rows, mb.token_weight.double(), mb.value_weight.double()
        values, old = require(new.values, "values"), require(x.old_values, "values")
        returns = require(x.returns, "returns")
        sums = {name: loss.metrics[f"{name}_avg"] for name in _FROM_LOSS} | {
            "loss/total": loss.total,
            "policy/advantages_mean": (w * x.advantages).sum(),
            "returns/mean": (v * returns).sum(),
            "returns/var": (v * returns.double() ** 2).sum(),  # mean of squares until statistics()
            "val/vpred": (v * values).sum(),
            "val/error": (v * (values - returns) ** 2).sum(),
            "val/mean": (v * old).sum(),
            "val/var": (v * old.double() ** 2).sum(),  # mean of squares, as above
            "tokens": (v > 0).sum(),
        }
        for name, number in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + number.detach().double()
        ratio = (new.logprobs - x.old_logprobs).exp()
        self.tokens.append(torch.stack([ratio, x.advantages, x.loss_mask.float()]).flatten(1))

    def statistics(self, total: Total) -> dict[str, Tensor]:
        """The statistics of the step: scalars over all ranks, two float32 [n] of this rank."""
        sums = dict(zip(self.sums, total(torch.stack([*self.sums.values()])), strict=True))
        ratio, advantages, trained = torch.cat(self.tokens, 1).cpu()
        fix = sums["tokens"] / (sums["tokens"] - 1).clamp(min=1)  # makes variances unbiased
        for mean, var in (("returns/mean", "returns/var"), ("val/mean", "val/var")):
            sums[var] = fix * (sums[var] - sums[mean] ** 2).clamp(min=0)
        stats = {name: x.float() for name, x in sums.items() if name != "tokens"}
        return stats | {
            "policy/advantages": advantages[trained.bool()],
            "policy/ratio": ratio[trained.bool()],
        }


_FROM_LOSS = (
    *("loss/policy", "loss/value", "policy/entropy", "policy/approxkl", "policy/policykl"),
    *("policy/clipfrac", "val/clipfrac"),
)


class StatsRecorder(Hook):
    """Records advantage inputs and outputs and every optimizer step of an iteration."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Discard the last iteration."""
        self.advantage_inputs: AdvantageInputs | None = None
        self.advantage_output: AdvantageOutput | None = None
        self.steps: list[OptimizerStep] = []
        self._open = OptimizerStep()
        self.started, self.annotated, self.credited = time.perf_counter(), 0.0, 0.0

    def record_algorithm(self, algorithm: Algorithm) -> Algorithm:
        """Wrap an algorithm so that its inputs and outputs are recorded."""

        def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
            self.annotated = time.perf_counter()
            self.advantage_inputs = e
            self.advantage_output = algorithm.compute_advantages(e, kl_coef)
            self.credited = time.perf_counter()
            return self.advantage_output

        def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
            result = algorithm.loss(new, mb)
            self._open.add(new, mb, result)
            return result

        return replace(algorithm, compute_advantages=compute_advantages, loss=loss)

    def on_optimizer_step(self) -> None:
        """Close the current optimizer step."""
        self.steps.append(self._open)
        self._open = OptimizerStep()


STAGES = (
    *("forward_pass", "compute_rewards", "compute_advantages", "optimize_step", "calc_stats"),
    "total",
)
KEYS = (
    *("objective/kl", "objective/kl_dist", "objective/logprobs", "objective/ref_logprobs"),
    *("objective/kl_coef", "objective/entropy", "ppo/mean_non_score_reward"),
    *("ppo/mean_scores", "ppo/std_scores", "ppo/learning_rate", "ppo/loss/policy"),
    *("ppo/loss/value", "ppo/loss/total", "ppo/policy/entropy", "ppo/policy/approxkl"),
    *("ppo/policy/policykl", "ppo/policy/clipfrac", "ppo/policy/advantages"),
    *("ppo/policy/advantages_mean", "ppo/policy/ratio", "ppo/returns/mean", "ppo/returns/var"),
    *("ppo/val/vpred", "ppo/val/error", "ppo/val/clipfrac", "ppo/val/mean", "ppo/val/var"),
    *("ppo/val/var_explained", "tokens/queries_len_mean", "tokens/queries_len_std"),
    *("tokens/queries_dist", "tokens/responses_len_mean", "tokens/responses_len_std"),
    *("tokens/responses_dist", *(f"time/ppo/{x}" for x in STAGES)),
)
LISTS = ("policy/advantages", "policy/ratio")


def over_steps(step_stats: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Means of the statistics over optimizer steps; per-token values are concatenated."""
    return {
        name: torch.cat([torch.as_tensor(x[name]).flatten() for x in step_stats])
        if name in LISTS
        else torch.stack([torch.as_tensor(x[name]).float().mean() for x in step_stats]).mean()
        for name in step_stats[0]
    }


def update_statistics(
    kl_coef: float,
    *,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    non_score_reward: Tensor,
    train_stats: Mapping[str, Tensor],
    masks: Tensor,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    kls: Tensor,
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, Any]:
    """The statistics of one iteration, without learning rate and times.

    Scores are float32 [B]; other inputs [B, T], ignored outside ``masks``.  Means and deviations
    are over the ranks that ``total`` sums over; arrays are of this rank.
    """
    mask, rows = masks.bool(), torch.ones(len(scores), dtype=torch.bool)
    per_response = torch.where(mask, kls, 0.0).sum(-1).cpu()
    minus_logprob = torch.where(mask, -logprobs, 0.0).sum(-1).cpu()
    kl = masked_mean(per_response, rows, all_reduce=total)
    score, spread = moments(scores.double().cpu(), rows, all_reduce=total)
    if float(kl) < -1.0:
        warnings.warn(
            f"the KL to the reference is {float(kl):.2f} nats per response, but must be about 0 or "
            "more: sample without top-k, top-p, repetition penalty and minimum length, and check "
            "that padding is masked",
            stacklevel=3,
        )
    stats: dict[str, Any] = {
        "objective/kl": kl,
        "objective/kl_dist": per_response,
        "objective/logprobs": torch.where(mask, logprobs, 0.0),
        "objective/ref_logprobs": torch.where(mask, ref_logprobs, 0.0),
        "objective/kl_coef": float(kl_coef),
        "objective/entropy": masked_mean(minus_logprob, rows, all_reduce=total),
        "ppo/mean_non_score_reward": masked_mean(non_score_reward, mask, all_reduce=total),
        "ppo/mean_scores": score,
        "ppo/std_scores": spread,
    }
    for name, texts in (("queries", queries), ("responses", responses)):
        lengths = torch.tensor([float(len(x)) for x in texts])
        center, width = moments(lengths, rows, all_reduce=total)
        stats[f"tokens/{name}_len_mean"] = float(center)
        stats[f"tokens/{name}_len_std"] = float(width)
        stats[f"tokens/{name}_dist"] = lengths.numpy()
    for name, x in train_stats.items():
        stats[f"ppo/{name}"] = x.flatten() if name in LISTS else x.float().mean()
    if {"ppo/val/error", "ppo/returns/var"} <= stats.keys():
        error, variance = (stats[f"ppo/{x}"].double() for x in ("val/error", "returns/var"))
        unexplained = torch.where(variance > 0, error / variance, torch.ones_like(error))
        stats["ppo/val/var_explained"] = 1 - unexplained
    return stats
