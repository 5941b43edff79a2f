"""Limits that skip an optimizer step or end the epochs over a batch early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RATIO = "val/ratio"
KL = "policy/policykl_avg"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Decides about each optimizer step after its backward pass and before it is applied.

    Limits are compared with means over all tokens of the step on all ranks, so that all ranks
    make the same decision.
    """

    max_ratio: float | None = None  # skip steps with a larger mean probability ratio
    # nats per token; stop training on the batch once the KL to the behavior policy exceeds it
    max_kl: float | None = None
    keep_last: bool = False  # whether the step that exceeds ``max_kl`` is still applied

    def should_apply(self, metrics: Mapping[str, float]) -> bool:
        """Whether to apply the step with these metrics."""
        over_ratio = self.max_ratio is not None and metrics[RATIO] > self.max_ratio
        return not over_ratio and (self.keep_last or not self.should_stop(metrics))

    def should_stop(self, metrics: Mapping[str, float]) -> bool:
        """Whether the step with these metrics is the last of the iteration."""
        return self.max_kl is not None and metrics[KL] > self.max_kl
