"""The loop's hooks for a Trainer-style trainer: callbacks, logging, evaluation, saving."""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.backends.trackers import Screen
from kedge.engine.checkpoint import checkpoint
from kedge.engine.hooks import StepReport
from kedge.errors import CheckpointError
from kedge.trainers.run.hf_callbacks import Callbacks, merge_rows, share_control
from kedge.types import Experience, RewardOutput, Rollout

logger = logging.getLogger(__name__)


class TrainerHooks:
    """Turns what happens in the loop into events, rows, evaluations and checkpoints.

    Order within one iteration, as in ``transformers.Trainer``: on_step_begin; per optimizer step
    on_optimizer_step; on_step_end; then, where control asks for it, on_log, evaluation with
    on_evaluate, saving with on_save; after each pass over the prompts on_epoch_end, and again what
    control asks for.

    Args:
        callbacks: the callbacks; ``begin`` was called (and ``restore`` before it on a resume).
        steps_per_epoch: iterations of one pass over the prompts, may be a fraction.
        evaluate: runs an evaluation, which calls ``callbacks.evaluated``; returns its metrics.
        save: writes a checkpoint of the current state, ``trainer_state.json`` (by
            ``callbacks.write_state``) included; every rank calls it.
        screen: advanced after each iteration, on rank 0.
        on_sample: called with every batch before it is trained on (recording).
        on_experience: called with the training data of every iteration (token log).
        after_step: called after each iteration, before logging (completions tables).
        total: element-wise sum of a tensor over all ranks; None for one process.
        clock: seconds.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        steps_per_epoch: float,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        save: Callable[[], Path] | None = None,
        screen: Screen | None = None,
        on_sample: Callable[[int, Rollout, RewardOutput], None] | None = None,
        on_experience: Callable[[int, Experience], None] | None = None,
        after_step: Callable[[StepReport], None] | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.callbacks, self.steps_per_epoch = callbacks, steps_per_epoch
        self._evaluate, self._save, self._screen = evaluate, save, screen
        self._on_sample, self._on_experience = on_sample, on_experience
        self._after_step = after_step
        self._total, self._clock = total, clock
        self._begin, self._first = clock(), callbacks.state.episode
        self._epoch_open = False
        self._saved = callbacks.state.global_step  # of the last checkpoint

    def on_step_begin(self, step: int) -> None:
        """Open a pass over the prompts if none is open, then the step."""
        if not self._epoch_open:
            self.callbacks.fire("on_epoch_begin")
            self._epoch_open = True
        self.callbacks.fire("on_step_begin")

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """Forward the batch."""
        if self._on_sample is not None:
            self._on_sample(step, rollout, reward_output)

    def on_experience(self, step: int, experience: Experience) -> None:
        """Forward the experience."""
        if self._on_experience is not None:
            self._on_experience(step, experience)

    def on_optimizer_step(self) -> None:
        """Forward the event."""
        self.callbacks.fire("on_optimizer_step")

    def on_step_end(self, report: StepReport) -> bool:
        """Everything that follows an iteration; True if a callback asks to stop."""
        state = self.callbacks.state
        before = math.floor(state.epoch + 1e-9)
        state.global_step = report.step
        state.epoch = report.step / self.steps_per_epoch
        state.episode = int(report.metrics.get("episode", state.episode))
        state.loss_sum += report.metrics.get("loss", 0.0)
        metrics = {**report.metrics, **self._measure(report)}
        state.pending.append(metrics)
        if self._screen is not None:
            self._screen.advance(report.step, metrics)
        if self._after_step is not None:
            self._after_step(report)
        self.callbacks.fire("on_step_end")
        self._act()
        if math.floor(state.epoch + 1e-9) > before:
            self._end_epoch()
        return self.callbacks.control.should_training_stop

    def _measure(self, report: StepReport) -> dict[str, float]:
        state, args = self.callbacks.state, self.callbacks.args
        elapsed = max(self._clock() - self._begin, 1e-9)
        metrics: dict[str, float] = {"eps": (state.episode - self._first) / elapsed}
        if "rollout/tokens" in report.metrics:
            state.num_tokens += round(report.metrics["rollout/tokens"])
            metrics["num_tokens"] = state.num_tokens
        include = str(args.include_num_input_tokens_seen)
        if include != "no":
            local = tokens_in(report.rollout, include)
            state.num_input_tokens_seen += over_ranks(local, self._total)
            metrics["num_input_tokens_seen"] = state.num_input_tokens_seen
        if not args.skip_memory_metrics:
            metrics |= peak_memory()
        return metrics

    def on_failure(self, step: int, error: Exception) -> None:
        """Save the iterations that no checkpoint holds yet, and say how to resume."""
        args = self.callbacks.args
        if step <= self._saved or isinstance(error, CheckpointError):
            return
        since = f"training stopped after iteration {step} with {type(error).__name__}"
        if self._save is None or args.save_strategy == "no":
            why = "save_strategy='no'" if self._save else "output_dir is not set"
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
        if self.callbacks.state.is_world_process_zero:
            logger.warning("%s", message)

    def end_pass(self) -> None:
        """After the last iteration: end the open pass over the prompts and log pending rows.

        Not called after an exception: it may save, and the weights may be inconsistent.
        """
        if self._epoch_open:
            self._end_epoch()
        if self.callbacks.args.logging_strategy != "no":
            self._log()

    def evaluate_at_start(self, *, always: bool = False) -> None:
        """Evaluate before training, if ``eval_on_start`` or ``always``."""
        if (always or self.callbacks.args.eval_on_start) and self._evaluate is not None:
            self._evaluate()

    def _end_epoch(self) -> None:
        self._epoch_open = False
        self.callbacks.fire("on_epoch_end")
        self._act()

    def _act(self) -> None:
        """Log, evaluate and save as control says."""
        callbacks = self.callbacks
        if self._total is not None:
            share_control(callbacks.control, self._total)
        if callbacks.control.should_epoch_stop:
            callbacks.control.should_epoch_stop = False
            warnings.warn(
                "a callback set should_epoch_stop, which has no effect here; set "
                "should_training_stop to end training",
                stacklevel=3,
            )
        if callbacks.control.should_log:
            self._log()
        if callbacks.control.should_evaluate and self._evaluate is not None:
            best = callbacks.note_best(self._evaluate())
            if callbacks.args.save_strategy == "best":
                callbacks.control.should_save = best
        if callbacks.control.should_save and self._save is not None:
            self._save_now()

    def _log(self) -> None:
        """Log the mean of the iterations since the last row."""
        state = self.callbacks.state
        if state.pending:
            row, state.pending = merge_rows(state.pending), []
            self.callbacks.log(row)

    def _save_now(self) -> None:
        self._write()
        self.callbacks.fire("on_save")

    def _write(self) -> Path:
        assert self._save is not None
        callbacks, state = self.callbacks, self.callbacks.state
        root = Path(callbacks.args.output_dir or ".")
        best = root / f"checkpoint-{state.best_global_step}"
        if state.best_global_step == state.global_step or best.is_dir():
            state.best_model_checkpoint = str(best)
        saved = self._save()
        if state.is_world_process_zero:
            keep = (saved, state.best_model_checkpoint)
            checkpoint.rotate(root, callbacks.args.save_total_limit, keep=keep)
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


def over_ranks(x: int, total: Callable[[Tensor], Tensor] | None) -> int:
    """Sum over all ranks; ``total`` is None for one process."""
    return x if total is None else round(float(total(torch.tensor(float(x), dtype=torch.float64))))


def peak_memory(device: Any = None) -> dict[str, float]:
    """Peak memory in MiB: of this process, and of its tensors on the GPU if there is one."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    metrics = {"memory/peak_cpu": peak}
    if torch.cuda.is_available():
        metrics["memory/peak_gpu"] = torch.cuda.max_memory_allocated(device) / 2**20
    return metrics


def summary(seconds: float, updates: int, *, rows: int, loss: float) -> dict[str, float]:
    """The last row of a run, in the names of transformers.

    Args:
        seconds: duration of this call of ``train``.
        updates: iterations it finished.
        rows: responses per iteration.
        loss: mean over all iterations of the run.
    """
    duration = max(seconds, 1e-9)
    return {
        "train_runtime": seconds,
        "train_samples_per_second": updates * rows / duration,
        "train_steps_per_second": updates / duration,
        "train_loss": loss,
    }
