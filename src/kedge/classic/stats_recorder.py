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
from kedge.engine.hooks import NoHooks
from kedge.math.masked import masked_mean, moments
from kedge.types import AdvantageOutput, Loss, MicroBatch, PolicyOutput, require

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
        sums = {name: loss.metrics[key] for name, key in _FROM_LOSS.items()}
        sums |= {
            "total": loss.total,
            "advantages_mean": (w * x.advantages).sum(),
            "return": (v * returns).sum(),
            "return_squared": (v * returns.double() ** 2).sum(),
            "vpred": (v * values).sum(),
            "error": (v * (values - returns) ** 2).sum(),
            "value": (v * old).sum(),
            "value_squared": (v * old.double() ** 2).sum(),
            "tokens": (v > 0).sum(),
        }
        for name, number in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + number.detach().double()
        ratio = (new.logprobs - x.old_logprobs).exp()
        self.tokens.append(torch.stack([ratio, x.advantages, x.loss_mask.float()]).flatten(1))

    def statistics(self, total: Total) -> dict[str, Tensor]:
        """The statistics of the step: scalars over all ranks, two float32 [n] of this rank."""
        names = list(self.sums)
        sums = dict(zip(names, total(torch.stack([self.sums[n] for n in names])), strict=True))
        ratio, advantages, trained = torch.cat(self.tokens, 1).cpu()
        fix = sums["tokens"] / (sums["tokens"] - 1).clamp(min=1)  # unbiased variances
        stats = {
            "loss/policy": sums["policy"],
            "loss/value": sums["value_loss"],
            "loss/total": sums["total"],
            "policy/entropy": sums["entropy"],
            "policy/approxkl": sums["approxkl"],
            "policy/policykl": sums["policykl"],
            "policy/clipfrac": sums["clipfrac"],
            "policy/advantages_mean": sums["advantages_mean"],
            "returns/mean": sums["return"],
            "returns/var": fix * (sums["return_squared"] - sums["return"] ** 2).clamp(min=0),
            "val/vpred": sums["vpred"],
            "val/error": sums["error"],
            "val/clipfrac": sums["value_clipfrac"],
            "val/mean": sums["value"],
            "val/var": fix * (sums["value_squared"] - sums["value"] ** 2).clamp(min=0),
        }
        return {name: x.float() for name, x in stats.items()} | {
            "policy/advantages": advantages[trained.bool()],
            "policy/ratio": ratio[trained.bool()],
        }


_FROM_LOSS = {
    "policy": "loss/policy_avg",
    "value_loss": "loss/value_avg",
    "entropy": "policy/entropy_avg",
    "approxkl": "policy/approxkl_avg",
    "policykl": "policy/policykl_avg",
    "clipfrac": "policy/clipfrac_avg",
    "value_clipfrac": "val/clipfrac_avg",
}


class StatsRecorder(NoHooks):
    """Records advantage inputs and outputs and every optimizer step of an iteration."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Discard the last iteration."""
        self.advantage_inputs: AdvantageInputs | None = None
        self.advantage_output: AdvantageOutput | None = None
        self.steps: list[OptimizerStep] = []
        self._open = OptimizerStep()
        self.started, self.annotated, self.credited = self._clock(), 0.0, 0.0

    def over(self, algorithm: Algorithm) -> Algorithm:
        """The same algorithm with recording."""

        def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
            self.annotated = self._clock()
            self.advantage_inputs, self.advantage_output = (
                e,
                algorithm.compute_advantages(e, kl_coef),
            )
            self.credited = self._clock()
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


OBJECTIVE = ("kl", "kl_dist", "logprobs", "ref_logprobs", "kl_coef", "entropy")
TRAIN = (
    *("loss/policy", "loss/value", "loss/total", "policy/entropy", "policy/approxkl"),
    *("policy/policykl", "policy/clipfrac", "policy/advantages", "policy/advantages_mean"),
    *("policy/ratio", "returns/mean", "returns/var", "val/vpred", "val/error"),
    *("val/clipfrac", "val/mean", "val/var"),
)
TOKENS = tuple(
    f"{x}_{y}" for x in ("queries", "responses") for y in ("len_mean", "len_std", "dist")
)
TIMES = (
    *("forward_pass", "compute_rewards", "compute_advantages"),
    *("optimize_step", "calc_stats", "total"),
)
KEYS = (
    *(f"objective/{x}" for x in OBJECTIVE),
    *("ppo/mean_non_score_reward", "ppo/mean_scores", "ppo/std_scores", "ppo/learning_rate"),
    *(f"ppo/{x}" for x in TRAIN),
    "ppo/val/var_explained",
    *(f"tokens/{x}" for x in TOKENS),
    *(f"time/ppo/{x}" for x in TIMES),
)
LISTS = ("policy/advantages", "policy/ratio")


def over_steps(step_stats: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Statistics over optimizer steps: means; per-token values are concatenated."""
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

    Means and deviations are over the ranks that ``total`` sums over; arrays are of this rank.

    Args:
        kl_coef: KL coefficient used.
        scores: float32 [B].
        logprobs: float32 [B, T] of the sampling policy; ignored outside the mask.
        ref_logprobs: float32 [B, T].
        non_score_reward: float32 [B, T].
        train_stats: of the optimizer steps.
        masks: bool [B, T], trained tokens.
        queries: int64 [P_i] each.
        responses: int64 [R_i] each.
        kls: float32 [B, T].
        total: sums a tensor over ranks; the default stays on this rank.

    Returns:
        Tensors, and floats for ``objective/kl_coef`` and the lengths.
    """
    mask, rows = masks.bool(), torch.ones(len(scores), dtype=torch.bool)
    per_response = torch.where(mask, kls, 0.0).sum(-1).cpu()
    minus_logprob = torch.where(mask, -logprobs, 0.0).sum(-1).cpu()
    kl = masked_mean(per_response, rows, total=total)
    score, spread = moments(scores.double().cpu(), rows, total=total)
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
        "objective/entropy": masked_mean(minus_logprob, rows, total=total),
        "ppo/mean_non_score_reward": masked_mean(non_score_reward, mask, total=total),
        "ppo/mean_scores": score,
        "ppo/std_scores": spread,
    }
    for name, texts in (("queries", queries), ("responses", responses)):
        lengths = torch.tensor([float(len(x)) for x in texts])
        center, width = moments(lengths, rows, total=total)
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
