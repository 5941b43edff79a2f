"""Counts progress, fires the events of callbacks, and logs when a callback asks for it."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kedge.records.protocols import Hook
from kedge.records.types import RewardOutput, Rollout, StepReport
from kedge.trainers.hf_callbacks import merge_rows, share_control
from kedge.trainers.hooks.parts import RunParts

if TYPE_CHECKING:
    from kedge.checkpoint.replay import RolloutRecorder
    from kedge.reporting.trackers import ConsoleTracker


@dataclass(kw_only=True)
class Logging(RunParts, Hook):
    """Comes before the hooks that act on what it counts and what callbacks decide.

    A row covers the iterations since the last one, which are ``state.pending``.
    """

    screen: ConsoleTracker | None = None  # on rank 0
    recorder: RolloutRecorder | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._begin, self._first_episode = self.clock(), self.state.episode
        self._first_step = self.state.global_step + 1

    def on_epoch_begin(self) -> None:
        """Forward the event."""
        self.callbacks.fire("on_epoch_begin")

    def on_step_begin(self, step: int) -> None:
        """Forward the event."""
        self.callbacks.fire("on_step_begin")

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """Record the batch."""
        if self.recorder is not None:
            with self.best_effort.writing("recorded rollouts", self.recorder.folder):
                self.recorder.write(step, rollout, reward_output)

    def on_optimizer_step(self) -> None:
        """Forward the event."""
        self.callbacks.fire("on_optimizer_step")

    def on_step_end(self, report: StepReport) -> None:
        """Count the iteration, let callbacks decide, and log if one asks for it."""
        state, every = self.state, self.args.torch_empty_cache_steps
        state.global_step = report.step
        state.epoch = report.step / self.engine.batch_sizes.epoch_length
        state.episode = int(report.metrics.get("episode", state.episode))
        state.loss_sum += report.metrics.get("loss", 0.0)
        row = {**report.metrics, **self._measure(report)}
        if self.screen is not None:
            self.screen.advance(report.step, row)
        state.pending.append(row | self.metric_names(row))
        if every and report.step % every == 0 and torch.cuda.is_available():
            from kedge.rollout.embedded.decode import capturing

            with capturing:  # a sampling thread may be capturing a decode step
                torch.cuda.empty_cache()
        self.callbacks.fire("on_step_end")
        self._log_if_asked()
        first = self._first_step == report.step < state.max_steps
        if first and state.pending and self.screen is not None:
            self.screen.log(row, step=report.step)  # shows progress before the first logged row

    def on_epoch_end(self) -> None:
        """Forward the event, and log if a callback asks for it."""
        self.callbacks.fire("on_epoch_end")
        self._log_if_asked()

    def _log_if_asked(self) -> None:
        if self.learner.world_size > 1:
            share_control(self.callbacks.control, self.learner.all_reduce)
        control = self.callbacks.control
        if control.should_epoch_stop:
            control.should_epoch_stop = False
            warnings.warn(
                "a callback set should_epoch_stop, which has no effect here; set "
                "should_training_stop to end training",
                stacklevel=3,
            )
        if control.should_log and self.state.pending:
            self.callbacks.log(self.take_pending())

    def take_pending(self) -> dict[str, float]:
        """Take the pending iterations and return their mean."""
        rows, self.state.pending = self.state.pending, []
        return merge_rows(rows)

    def _measure(self, report: StepReport) -> dict[str, float]:
        state, args = self.state, self.args
        elapsed = max(self.clock() - self._begin, 1e-9)
        metrics: dict[str, float] = {"eps": (state.episode - self._first_episode) / elapsed}
        if "rollout/tokens" in report.metrics:
            state.num_tokens += round(report.metrics["rollout/tokens"])
            metrics["num_tokens"] = state.num_tokens
        include = str(args.include_num_input_tokens_seen)
        if include != "no":
            rollout, prompts = report.rollout, report.rollout.prompts
            count = (
                prompts.ids.numel() + rollout.ids.numel()
                if include == "all"  # padding included
                else int(prompts.mask.sum()) + int(rollout.response_mask.sum())
            )
            tokens = torch.tensor(float(count), dtype=torch.float64)
            state.num_input_tokens_seen += round(float(self.learner.all_reduce(tokens)))
            metrics["num_input_tokens_seen"] = state.num_input_tokens_seen
        if not args.skip_memory_metrics:
            unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            metrics["memory/peak_cpu"] = peak / 2**20  # MiB
            if torch.cuda.is_available():
                metrics["memory/peak_gpu"] = torch.cuda.max_memory_allocated() / 2**20
        return metrics
