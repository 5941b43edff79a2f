"""Checks the first batch, and logs once what rules and the doctor find while a run trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kedge import plugins
from kedge.records.errors import ConfigError, describe_error
from kedge.records.protocols import Hook
from kedge.records.types import RewardOutput, Rollout, StepReport
from kedge.trainers.advice import (
    FULL_PRECISION,
    ITERATION,
    LOW_PRECISION,
    MUCH_NOISE,
    FirstBatch,
    Iteration,
    preflight,
)
from kedge.trainers.hooks.parts import RunParts

if TYPE_CHECKING:
    from kedge.reporting.trackers import ConsoleTracker


@dataclass(kw_only=True)
class Warnings(RunParts, Hook):
    """Each rule warns once in a call of ``train``, on rank 0."""

    screen: ConsoleTracker | None = None  # on rank 0
    known: set[str] = field(default_factory=set)  # rules that have warned
    _last: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=MUCH_NOISE))
    _rows: int = 0  # of the log that the doctor has read

    def __post_init__(self) -> None:
        self._accepted = {finding.rule for finding in self._findings()}  # by resuming the run
        if self.args.stop_on_finding and plugins.load("kedge.hooks", "doctor") is None:
            raise ConfigError("stop_on_finding=True needs kedge doctor, which is not installed")

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """Check the first batch."""
        if step or not self.args.preflight:
            return
        length, alias = "response_length", self.args.length_option
        low = self.engine.learner.low_precision or self.args.tf32
        batch = FirstBatch(
            rollout=rollout,
            reward_output=reward_output,
            loop=self.engine,
            fresh_reference=self.fresh_reference,
            length_option=length if alias == length else f"{length} ({alias})",
            decode=getattr(self.tokenizer, "decode", None),
            tolerance=LOW_PRECISION if low else FULL_PRECISION,
        )
        problems = preflight(batch)
        for problem in problems:
            self.warn(f"preflight: {problem}")
        if self.screen is not None:
            sizes = self.engine.batch_sizes
            passed = reward_output.valid.any() and not problems
            count, steps = sizes.iterations, sizes.optimizer_steps_per_iteration
            late = self.args.save_strategy == "steps" and self.state.save_steps > count
            self.screen.note(
                f"{'preflight passed; ' * bool(passed)}{count} iteration{'s' * (count != 1)} of"
                f" {sizes.batch_size} responses, {steps} optimizer step{'s' * (steps != 1)} each"
                f"{f'; no checkpoint before the end (save_steps={self.args.save_steps})' * late}"
            )

    def on_step_end(self, report: StepReport) -> None:
        """Apply the rules of single iterations; let the doctor read new rows."""
        self._last.append(report.metrics)
        delay = self.engine.value_warmup_steps  # then the rate rises to its peak
        rise = self.args.get_warmup_steps(max(1, self.state.max_steps - delay))
        iteration = Iteration(
            args=self.args, last=tuple(self._last), at_peak=report.step == 1 + delay + rise
        )
        for rule in ITERATION:
            if rule.__name__ not in self.known and (text := rule(iteration)) is not None:
                self.known.add(rule.__name__)
                self.warn(text)
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        """Warn once of each finding of ``kedge doctor``: every few rows, and at checkpoints."""
        history, state = self.state.log_history, self.state
        new, saves = len(history) - self._rows, self.callbacks.control.should_save
        if not new or (new < len(history) // 50 and not saves):
            return
        self._rows = len(history)
        so_far = f"(so far, at iteration {state.global_step} of {state.max_steps})"
        stops = self.args.stop_on_finding and state.global_step < state.max_steps
        for found in self._findings():
            if found.rule not in self.known:
                self.known.add(found.rule)
                self.warn(f"{found.rule} {so_far}: {found.seen}. To try: {found.advice}")
                if stops and found.severe and found.rule not in self._accepted:
                    self.trainer.stopped_by = self.trainer.stopped_by or found.rule

    def _findings(self) -> list[Any]:
        state, examine = self.state, plugins.load("kedge.hooks", "doctor")
        rows = [row for row in state.log_history if "objective/scores" in row]
        share = state.global_step / max(1, state.max_steps)
        try:
            return examine(rows, options=self.args.to_dict(), share=share) if examine else []
        except Exception as error:  # what only looks at a run must not end it
            if "doctor" not in self.known:
                self.known.add("doctor")
                self.warn(f"kedge doctor cannot read this log: {describe_error(error)}")
            return []
