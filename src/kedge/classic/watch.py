"""What an update goes through, kept for its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kedge.algorithms.base import Algorithm, Evidence
from kedge.engine.hooks import NoHooks
from kedge.types import Credit, Loss, MicroBatch, PolicyOutput, given

Total = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class OptimiserStep:
    """Sums over the micro-batches of one optimiser step, and the numbers of each trained token.

    Loss weights sum to 1 over the step, so that weighted sums are means over its tokens.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)  # float64 scalars
    ratios: list[Tensor] = field(default_factory=list)  # float32 [n]
    advantages: list[Tensor] = field(default_factory=list)  # float32 [n]

    @torch.no_grad()
    def add(self, new: PolicyOutput, mb: MicroBatch, loss: Loss) -> None:
        """Take in one micro-batch."""
        x, w, v = mb.rows, mb.token_weight.double(), mb.value_weight.double()
        values, old = given(new.values, "values"), given(x.old_values, "values")
        returns = given(x.returns, "returns")
        found = {name: loss.metrics[key] for name, key in _FROM_LOSS.items()}
        found |= {
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
        for name, number in found.items():
            self.sums[name] = self.sums.get(name, 0.0) + number.detach().double()
        log_ratio = new.logprobs - x.old_logprobs
        self.ratios.append(log_ratio[x.mask].exp().cpu())
        self.advantages.append(x.advantages[x.mask].cpu())

    def statistics(self, total: Total) -> dict[str, Tensor]:
        """The classic statistics of the step: scalars over all ranks, and two float32 [n]."""
        names = list(self.sums)
        sums = dict(zip(names, total(torch.stack([self.sums[n] for n in names])), strict=True))
        fix = sums["tokens"] / (sums["tokens"] - 1).clamp(min=1)  # unbiased variances
        found = {
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
        return {name: x.float() for name, x in found.items()} | {
            "policy/advantages": torch.cat(self.advantages),
            "policy/ratio": torch.cat(self.ratios),
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


class Watch(NoHooks):
    """Looks on while the core makes an update: what was known, and every optimiser step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Forget the last update."""
        self.evidence: Evidence | None = None
        self.credit: Credit | None = None
        self.steps: list[OptimiserStep] = []
        self._open = OptimiserStep()
        self.started, self.annotated, self.credited = self._clock(), 0.0, 0.0

    def over(self, algorithm: Algorithm) -> Algorithm:
        """The same algorithm, watched."""

        def credit(e: Evidence, kl_coef: float) -> Credit:
            self.annotated = self._clock()
            self.evidence, self.credit = e, algorithm.credit(e, kl_coef)
            self.credited = self._clock()
            return self.credit

        def loss(new: PolicyOutput, mb: MicroBatch) -> Loss:
            found = algorithm.loss(new, mb)
            self._open.add(new, mb, found)
            return found

        return replace(algorithm, credit=credit, loss=loss)

    def on_optimizer_step(self) -> None:
        """The micro-batches so far were one step."""
        self.steps.append(self._open)
        self._open = OptimiserStep()
