"""What a run and its hooks share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any

from kedge.config.base import OnPolicyConfig
from kedge.learner.learner import HFLearner
from kedge.loop.loop import Engine
from kedge.reporting.base import BestEffortWriter
from kedge.trainers.eval_metrics import EvalMetrics
from kedge.trainers.hf_callbacks import Callbacks, RunState
from kedge.trainers.prompts import EvalSet
from kedge.trainers.spec import MetricNames

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunParts:
    """The parts of a run."""

    trainer: Any  # evaluates and saves models, perhaps with methods that a subclass overrides
    args: OnPolicyConfig
    engine: Engine
    learner: HFLearner
    callbacks: Callbacks
    eval_sets: list[EvalSet]
    tokenizer: Any
    fresh_reference: bool  # the reference is the initial policy, so that the KL starts at 0
    metric_names: MetricNames
    eval_metrics: EvalMetrics | None = None  # of the user
    best_effort: BestEffortWriter = field(default_factory=BestEffortWriter)

    @property
    def parts(self) -> dict[str, Any]:
        """The shared fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(RunParts)}

    @property
    def state(self) -> RunState:
        """The state that callbacks see."""
        return self.callbacks.state

    def warn(self, message: str) -> None:
        """Log a warning on rank 0."""
        if self.state.is_world_process_zero:
            logger.warning("%s", message)
