"""The loop's hooks for a Trainer-style trainer: callbacks, logging, evaluation, saving."""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kedge.backends.hf.decode_graph import capturing
from kedge.backends.trackers import Screen
from kedge.config.schedule import IntervalSchedule
from kedge.engine.checkpoint import checkpoint
from kedge.engine.checkpoint.replay import Recorder
from kedge.engine.hooks import Hooks, StepReport
from kedge.errors import CheckpointError
from kedge.trainers.reporting.token_log import TokenLog
from kedge.trainers.run.hf_callbacks import RunState, merge_rows, share_control
from kedge.types import Experience, RewardOutput, Rollout

if TYPE_CHECKING:
    from kedge.trainers.run.run import Run

logger = logging.getLogger(__name__)


class RunHooks(Hooks):
    """Turns what happens in the loop into events, rows, evaluations and checkpoints of a run.

    Order within one iteration, as in ``transformers.Trainer``: on_step_begin; per optimizer step
    on_optimizer_step; on_step_end; then, where control asks for it, on_log, evaluation with
    on_evaluate, saving with on_save; after each pass over the prompts on_epoch_end, and again what
    control asks for.

    Args:
        run: the run; its callbacks were begun, and restored before that on a resume.
        schedule: when tables of completions are shown; None: never.
        screen: advanced after each iteration, on rank 0.
        recorder: records every batch.
        token_log: writes some responses token by token.
        clock: seconds.
    """

    def __init__(
        self,
        run: Run,
        *,
        schedule: IntervalSchedule | None = None,
        screen: Screen | None = None,
        recorder: Recorder | None = None,
        token_log: TokenLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.run, self.args, self.callbacks = run, run.args, run.callbacks
        self.schedule, self.screen, self.recorder = schedule, screen, recorder
        self.token_log, self.clock = token_log, clock
        self._begin, self._first_episode = clock(), self.state.episode
        self._epoch_open = False
        self._saved = self.state.global_step  # of the last checkpoint

    @property
    def state(self) -> RunState:
        """The state that callbacks see."""
        return self.callbacks.state

    def on_step_begin(self, step: int) -> None:
        """Open a pass over the prompts if none is open, then the step."""
        if not self._epoch_open:
            self.callbacks.fire("on_epoch_begin")
            self._epoch_open = True
        self.callbacks.fire("on_step_begin")

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """Record the batch; check the first one."""
        if self.recorder is not None:
            with self.run.best_effort.writing("recorded rollouts", self.recorder.folder):
                self.recorder.write(step, rollout, reward_output)
        if step == 0:
            self.run.check_first_batch(rollout, reward_output)

    def on_experience(self, step: int, experience: Experience) -> None:
        """Keep the rows of the token log."""
        if self.token_log is not None:
            self.token_log.hold(step, experience)

    def on_optimizer_step(self) -> None:
        """Forward the event."""
        self.callbacks.fire("on_optimizer_step")

    def on_step_end(self, report: StepReport) -> bool:
        """Everything that follows an iteration; True if a callback asks to stop."""
        state = self.state
        before = math.floor((state.epoch or 0.0) + 1e-9)
        state.global_step = report.step
        state.epoch = report.step / self.run.iterations_per_epoch
        state.episode = int(report.metrics.get("episode", state.episode))
        state.loss_sum += report.metrics.get("loss", 0.0)
        row = {**report.metrics, **self._measure(report)}
        if self.screen is not None:
            self.screen.advance(report.step, row)
        state.pending.append(row | self.run.metric_names(row))
        if self.token_log is not None:
            self.token_log.write(report)
        if self.schedule is not None and self.schedule.samples(report.step):
            self.run.evaluator.show_samples(report)
        self._empty_cache(report.step)
        self.callbacks.fire("on_step_end")
        self._act()
        if math.floor(state.epoch + 1e-9) > before:
            self._end_epoch()
        return self.callbacks.control.should_training_stop

    def _empty_cache(self, step: int) -> None:
        every = self.args.torch_empty_cache_steps
        if every and step % every == 0 and torch.cuda.is_available():
            with capturing:  # a thread that samples may be capturing a decode step
                torch.cuda.empty_cache()

    def _measure(self, report: StepReport) -> dict[str, float]:
        state, args = self.state, self.args
        elapsed = max(self.clock() - self._begin, 1e-9)
        metrics: dict[str, float] = {"eps": (state.episode - self._first_episode) / elapsed}
        if "rollout/tokens" in report.metrics:
            state.num_tokens += round(report.metrics["rollout/tokens"])
            metrics["num_tokens"] = state.num_tokens
        include = str(args.include_num_input_tokens_seen)
        if include != "no":
            tokens = torch.tensor(float(tokens_in(report.rollout, include)), dtype=torch.float64)
            state.num_input_tokens_seen += round(float(self.run.learner.total(tokens)))
            metrics["num_input_tokens_seen"] = state.num_input_tokens_seen
        if not args.skip_memory_metrics:
            metrics |= peak_memory()
        return metrics

    def on_failure(self, step: int, error: Exception) -> None:
        """Save the iterations that no checkpoint holds yet, and say how to resume."""
        args = self.args
        if step <= self._saved or isinstance(error, CheckpointError):
            return
        since = f"training stopped after iteration {step} with {type(error).__name__}"
        if not args.output_dir or args.save_strategy == "no":
            why = "save_strategy='no'" if args.output_dir else "output_dir is not set"
            self._warn(
                f"{since}; no checkpoint is written because {why}: unsaved iterations are lost"
            )
            return
        try:
            folder = self._write()
        except Exception as other:
            self._warn(f"{since}, and saving a checkpoint failed: {other}")
            return
        if args.save_only_model:
            self._warn(f"{since}; the models are in {folder} (save_only_model=True)")
            return
        self._warn(
            f"{since}; no completed iteration is lost. Fix the cause and resume from {folder} with"
            " train(resume_from_checkpoint=True), or --resume_from_checkpoint on the command line"
        )

    def _warn(self, message: str) -> None:
        if self.state.is_world_process_zero:
            logger.warning("%s", message)

    def end_pass(self) -> None:
        """After the last iteration: end the open pass over the prompts and log pending rows.

        Not called after an exception: it may save, and the weights may be inconsistent.
        """
        if self._epoch_open:
            self._end_epoch()
        if self.args.logging_strategy != "no":
            self._log()

    def evaluate_at_start(self, *, always: bool = False) -> None:
        """Evaluate before training, if ``eval_on_start`` or ``always``."""
        if (always or self.args.eval_on_start) and self.run.evaluator.sets:
            self.run.evaluator.evaluate()

    def _end_epoch(self) -> None:
        self._epoch_open = False
        self.callbacks.fire("on_epoch_end")
        self._act()

    def _act(self) -> None:
        """Log, evaluate and save as control says."""
        callbacks = self.callbacks
        if self.run.learner.world_size > 1:
            share_control(callbacks.control, self.run.learner.total)
        if callbacks.control.should_epoch_stop:
            callbacks.control.should_epoch_stop = False
            warnings.warn(
                "a callback set should_epoch_stop, which has no effect here; set "
                "should_training_stop to end training",
                stacklevel=3,
            )
        if callbacks.control.should_log:
            self._log()
        if callbacks.control.should_evaluate and self.run.evaluator.sets:
            best = callbacks.note_best(self.run.evaluator.evaluate())
            if self.args.save_strategy == "best":
                callbacks.control.should_save = best
        if callbacks.control.should_save and self.args.output_dir:
            self._write()
            callbacks.fire("on_save")

    def _log(self) -> None:
        """Log the mean of the iterations since the last row."""
        state = self.state
        if state.pending:
            row, state.pending = merge_rows(state.pending), []
            self.callbacks.log(row)

    def _write(self) -> Path:
        state, root = self.state, self.run.root()
        best = root / f"checkpoint-{state.best_global_step}"
        if state.best_global_step == state.global_step or best.is_dir():
            state.best_model_checkpoint = str(best)
        saved = self.run.save_checkpoint()
        if state.is_world_process_zero:
            keep = (saved, state.best_model_checkpoint)
            checkpoint.rotate(root, self.args.save_total_limit, keep=keep)
        self._saved = state.global_step
        return saved


def tokens_in(rollout: Rollout, include: str) -> int:
    """Tokens of a batch, prompts and responses, on this rank.

    Args:
        rollout: the batch.
        include: ``include_num_input_tokens_seen``: "all" counts padding too, "non_padding" does
            not, "no" is 0.
    """
    if include == "no":
        return 0
    prompts = rollout.prompts
    if include == "all":
        return prompts.ids.numel() + rollout.ids.numel()
    return int(prompts.mask.sum()) + int(rollout.response_mask.sum())


def peak_memory(device: Any = None) -> dict[str, float]:
    """Peak memory in MiB: of this process, and of its tensors on the GPU if there is one."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    metrics = {"memory/peak_cpu": peak}
    if torch.cuda.is_available():
        metrics["memory/peak_gpu"] = torch.cuda.max_memory_allocated(device) / 2**20
    return metrics
