"""When an optimizer step is left out, and when the passes over a batch end early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RATIO = "val/ratio"
KL = "policy/policykl_avg"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Looks at each optimizer step after its gradient is known and before it is taken.

    Both limits are compared with means over all tokens of the step, on all ranks, so that every
    rank decides the same.

    Args:
        max_ratio: a step whose mean probability ratio is larger is left out; None: no limit.
        max_kl: nats per token; a step at which the policy is further than this from the one that
            sampled ends the passes over the batch; None: no limit.
        keep_last: whether that last step is taken first.
    """

    max_ratio: float | None = None
    max_kl: float | None = None
    keep_last: bool = False

    def should_apply(self, metrics: Mapping[str, float]) -> bool:
        """Whether the step with these metrics shall be taken."""
        steep = self.max_ratio is not None and metrics[RATIO] > self.max_ratio
        return not steep and (self.keep_last or not self.should_stop(metrics))

    def should_stop(self, metrics: Mapping[str, float]) -> bool:
        """Whether no step shall follow the one with these metrics."""
        return self.max_kl is not None and metrics[KL] > self.max_kl
