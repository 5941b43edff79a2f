"""One training run behind a Trainer-style API: train, save, resume."""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import TrainOutput

from kedge.backends.hf.learner import HFLearner
from kedge.backends.trackers import Screen, draw_curves
from kedge.config.resolve import RunSettings
from kedge.config.schedule import IntervalSchedule, build_schedule
from kedge.engine.checkpoint import checkpoint
from kedge.engine.checkpoint.replay import pack
from kedge.engine.hooks import StepReport
from kedge.engine.loop import Engine
from kedge.engine.preflight import FULL_PRECISION, LOW_PRECISION, preflight
from kedge.errors import ConfigError
from kedge.trainers.reporting.best_effort import BestEffortWriter
from kedge.trainers.reporting.token_log import TokenLog, token_rows
from kedge.trainers.reporting.trackers import build_trackers, link
from kedge.trainers.run.checkpoint import (
    build_recorder,
    earlier_run,
    resume_fingerprint,
    write_models,
)
from kedge.trainers.run.evaluation import Evaluator, printed_rows
from kedge.trainers.run.hf_callbacks import Callbacks
from kedge.trainers.run.hooks import TrainerHooks, summary
from kedge.trainers.run.resume import resume_run
from kedge.types import RewardOutput, Rollout

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Run:
    """The engine of a Trainer-style trainer and everything around it.

    Args:
        args: the config; callbacks and intervals read it.
        settings: the resolved config.
        engine: the loop.
        learner: the models; the same object as ``engine.learner``.
        callbacks: callbacks, state and control.
        evaluator: evaluations and tables of completions.
        tokenizer: saved with the models.
        fresh_reference: the reference is a copy of the initial policy, so the KL starts at 0.
        more: extra metrics of an iteration, computed from its row.
        best_effort: writes files whose failures are only logged.
    """

    args: Any
    settings: RunSettings
    engine: Engine
    learner: HFLearner
    callbacks: Callbacks
    evaluator: Evaluator
    tokenizer: Any
    fresh_reference: bool
    more: Callable[[Mapping[str, float]], Mapping[str, float]] = dict
    best_effort: BestEffortWriter = field(default_factory=BestEffortWriter)

    def train(self, resume: str | bool | None) -> TrainOutput:
        """Train all iterations, or until a callback stops the run.

        Args:
            resume: True for the newest intact checkpoint in ``output_dir``, or a folder.

        Raises:
            CheckpointError: it is missing, damaged or from another run.
            PreflightError: a check of the first batch failed.
        """
        engine, sizes = self.engine, self.engine.batch_sizes
        self._tidy(starting=not resume)
        resumed = resume_run(self, resume)
        screen = self._open_trackers()
        if screen is not None and resumed is not None:
            screen.note(f"resuming from {resumed} (iteration {engine.step} of {sizes.updates})")
        per_epoch = sizes.updates_per_epoch or sizes.updates
        self.callbacks.begin(
            max_steps=sizes.updates, epochs=sizes.updates / per_epoch, batch_size=sizes.local_rows
        )
        link(self.callbacks, self.args)
        rows = token_rows(self.args, self._schedule(), self.learner, self.tokenizer)
        engine.hooks = hooks = TrainerHooks(
            self.callbacks,
            steps_per_epoch=per_epoch,
            evaluate=self.evaluator.evaluate if self.evaluator.sets else None,
            save=self.save_checkpoint if self.args.output_dir else None,
            screen=screen,
            on_sample=self._on_sample(),
            on_experience=rows.hold if rows is not None else None,
            after_step=self._after_step(rows),
            total=self.learner.total if self.learner.world_size > 1 else None,
        )
        if resumed is None:
            hooks.evaluate_at_start(always=self.evaluator.initial_scores is not None)
        begin, before = time.perf_counter(), engine.step
        try:
            engine.run(sizes.updates)
            hooks.end_pass()
            seconds, updates = time.perf_counter() - begin, engine.step - before
            loss = self.callbacks.state.loss_sum / max(engine.step, 1)
            totals = summary(seconds, updates, rows=sizes.batch_size, loss=loss)
            if updates:
                self.callbacks.log(totals)
            self._load_best()
            self.callbacks.fire("on_train_end")
        finally:
            self.callbacks.tracker.close()
        if screen is not None and self.args.output_dir:
            root = shlex.quote(str(self.root()))
            screen.note(f"the run is in {root}; `kedge report {root}` writes a report of it")
        return self._output(totals)

    def _output(self, totals: dict[str, float]) -> TrainOutput:
        state = self.callbacks.state
        if self.args.output_dir and state.is_world_process_zero:
            file = self.root() / "curves.png"
            with self.best_effort.writing("curves", file):
                draw_curves(state.log_history, file)
        metrics = totals | {"episode": state.episode, "epoch": state.epoch or 0.0}
        return TrainOutput(self.engine.step, totals["train_loss"], metrics)

    # -- during training --------------------------------------------------------------------------

    def _on_sample(self) -> Callable[[int, Rollout, RewardOutput], None]:
        recorder = build_recorder(self.settings, self.learner)

        def look(step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
            if recorder is not None:
                with self.best_effort.writing("recorded rollouts", recorder.folder):
                    recorder.write(step, rollout, reward_output)
            if step == 0 and self.settings.preflight:
                self._preflight(rollout, reward_output)

        return look

    def _preflight(self, rollout: Rollout, reward_output: RewardOutput) -> None:
        low = self.settings.learner.precision != "no"
        warnings = preflight(
            rollout,
            reward_output,
            engine=self.engine.rollout_engine,
            learner=self.learner,
            algorithm=self.engine.algorithm,
            kl_coef=self.engine.kl.value,
            fresh_reference=self.fresh_reference,
            sampling=self.settings.sampling,
            length_option=self.args.length_option,
            tolerance=LOW_PRECISION if low else FULL_PRECISION,
        )
        for warning in warnings if self.learner.rank == 0 else []:
            logger.warning("preflight: %s", warning)

    def _schedule(self) -> IntervalSchedule:
        sizes = self.engine.batch_sizes
        return build_schedule(
            self.args, updates=sizes.updates, updates_per_epoch=sizes.updates_per_epoch
        )

    def _after_step(self, rows: TokenLog | None) -> Callable[[StepReport], None]:
        when, empty = self._schedule(), self.args.torch_empty_cache_steps

        def after(report: StepReport) -> None:
            row = self.callbacks.state.pending[-1]
            row |= self.more(row)
            if rows is not None:
                rows.write(report)
            if when.samples(report.step):
                self.evaluator.show_samples(report)
            if empty and report.step % empty == 0 and self.learner.device.type == "cuda":
                torch.cuda.empty_cache()

        return after

    def _open_trackers(self) -> Screen | None:
        """Open the files and the screen on rank 0."""
        if not self.callbacks.state.is_world_process_zero:
            return None
        bar, tables = not self.args.disable_tqdm, self.args.num_sample_generations > 0
        updates, done, most = (
            self.engine.batch_sizes.updates,
            self.engine.step,
            printed_rows(self.args),
        )
        screen = Screen(updates, start=done, bar=bar, tables=tables, max_rows=most)
        self.callbacks.tracker = build_trackers(self.callbacks, self.args, screen, self.best_effort)
        return screen

    # -- checkpoints ----------------------------------------------------------------------------

    def save_checkpoint(self) -> Path:
        """Write ``checkpoint-N`` into the output folder; atomic if the process is killed."""
        engine, accelerator = self.engine, self.learner.accelerator
        parts = {} if self.args.save_only_model else engine.state_dict()
        in_flight = [pack(sample) for sample in engine.in_flight]
        return checkpoint.save(
            self.root(),
            engine.step,
            parts,
            local=in_flight or None,
            settings=resume_fingerprint(self.settings, engine, self.learner),
            write_models=self._write_models,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            barrier=accelerator.wait_for_everyone,
        )

    def _write_models(self, folder: Path) -> None:
        write_models(folder, self.learner, self.tokenizer)
        if self.callbacks.state.is_world_process_zero:
            self.callbacks.write_state(folder)

    def _tidy(self, *, starting: bool) -> None:
        """Remove incomplete files of a killed run, and old checkpoints if a new run may."""
        if not self.args.output_dir:
            return
        root, accelerator = self.root(), self.learner.accelerator
        first, main = starting and self.engine.step == 0, accelerator.is_main_process
        if main:
            checkpoint.tidy(root)
        accelerator.wait_for_everyone()
        old_checkpoints = (
            earlier_run(root, overwrite=self.args.overwrite_output_dir) if first else []
        )
        accelerator.wait_for_everyone()
        for folder in old_checkpoints if main else []:
            shutil.rmtree(folder)
        accelerator.wait_for_everyone()

    def _load_best(self) -> None:
        best = self.callbacks.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            saved = checkpoint.load(best)
            if not saved.parts:
                raise ConfigError("load_best_model_at_end=True needs save_only_model=False")
            with checkpoint.loading(Path(best)):
                self.learner.load_state_dict(saved.parts["learner"])
            rollout_engine = self.engine.rollout_engine
            if not rollout_engine.shares_weights:
                rollout_engine.load_weights(self.learner.weights(), self.learner.version)

    def root(self) -> Path:
        """The output folder.

        Raises:
            ConfigError: there is none.
        """
        if not self.args.output_dir:
            raise ConfigError("output_dir must be set to write checkpoints")
        return Path(self.args.output_dir)
