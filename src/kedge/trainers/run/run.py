"""One training run behind a Trainer-style API: train, save, resume."""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_utils import TrainOutput

from kedge.backends.hf.learner import HFLearner
from kedge.backends.trackers import Screen, draw_curves
from kedge.config.base import OnPolicyConfig
from kedge.config.schedule import build_schedule
from kedge.engine.checkpoint import checkpoint
from kedge.engine.checkpoint.replay import pack
from kedge.engine.loop import Engine
from kedge.engine.preflight import FULL_PRECISION, LOW_PRECISION, preflight
from kedge.errors import ConfigError
from kedge.ops.cpu.heap import kept_between_iterations
from kedge.trainers.reporting.best_effort import BestEffortWriter
from kedge.trainers.reporting.token_log import build_token_log
from kedge.trainers.reporting.trackers import build_trackers, link, log_prompt_lengths
from kedge.trainers.run.checkpoint import (
    build_recorder,
    earlier_run,
    resume_fingerprint,
    write_models,
)
from kedge.trainers.run.evaluation import Evaluator, printed_rows
from kedge.trainers.run.hf_callbacks import Callbacks
from kedge.trainers.run.hooks import RunHooks
from kedge.trainers.run.resume import resume_run
from kedge.trainers.spec import MetricNames
from kedge.types import RewardOutput, Rollout

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Run:
    """The engine of a Trainer-style trainer and everything around it.

    Args:
        args: the config; callbacks and intervals read it.
        engine: the loop.
        learner: the models; the same object as ``engine.learner``.
        callbacks: callbacks, state and control.
        evaluator: evaluations and tables of completions.
        tokenizer: saved with the models.
        fresh_reference: the reference is a copy of the initial policy, so the KL starts at 0.
        metric_names: adds metrics under other names to those of an iteration.
        best_effort: writes files whose failures are only logged.
    """

    args: OnPolicyConfig
    engine: Engine
    learner: HFLearner
    callbacks: Callbacks
    evaluator: Evaluator
    tokenizer: Any
    fresh_reference: bool
    metric_names: MetricNames
    best_effort: BestEffortWriter = field(default_factory=BestEffortWriter)

    @property
    def iterations_per_epoch(self) -> float:
        """Iterations of one pass over the prompts, may be a fraction."""
        sizes = self.engine.batch_sizes
        return sizes.iterations_per_epoch or sizes.iterations

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
            screen.note(f"resuming from {resumed} (iteration {engine.step} of {sizes.iterations})")
        self.callbacks.begin(
            max_steps=sizes.iterations,
            epochs=sizes.iterations / self.iterations_per_epoch,
            batch_size=sizes.local_rows,
        )
        link(self.callbacks, self.args)
        engine.hooks = hooks = self._build_hooks(screen)
        if resumed is None:
            log_prompt_lengths(self.callbacks, engine.source)
            hooks.evaluate_at_start(always=self.evaluator.initial_scores is not None)
        begin, before = time.perf_counter(), engine.step
        try:
            with kept_between_iterations():
                engine.run(sizes.iterations)
            hooks.end_pass()
            totals = self._totals(time.perf_counter() - begin, engine.step - before)
            if engine.step > before:
                self.callbacks.log(totals)
            self._load_best()
            self.callbacks.fire("on_train_end")
        finally:
            self.callbacks.tracker.close()
        if screen is not None and self.args.output_dir:
            root = shlex.quote(str(self.root()))
            screen.note(f"the run is in {root}; `kedge report {root}` writes a report of it")
        return self._output(totals)

    def _totals(self, seconds: float, iterations: int) -> dict[str, float]:
        """The last row, in the names of transformers; of this call of ``train``."""
        rate = iterations / max(seconds, 1e-9)
        return {
            "train_runtime": seconds,
            "train_samples_per_second": rate * self.engine.batch_sizes.batch_size,
            "train_steps_per_second": rate,
            "train_loss": self.callbacks.state.loss_sum / max(self.engine.step, 1),
        }

    def _output(self, totals: dict[str, float]) -> TrainOutput:
        state = self.callbacks.state
        if self.args.output_dir and state.is_world_process_zero:
            file = self.root() / "curves.png"
            with self.best_effort.writing("curves", file):
                draw_curves(state.log_history, file)
        metrics = totals | {"episode": state.episode, "epoch": state.epoch or 0.0}
        return TrainOutput(self.engine.step, totals["train_loss"], metrics)

    # -- during training --------------------------------------------------------------------------

    def _build_hooks(self, screen: Screen | None) -> RunHooks:
        sizes = self.engine.batch_sizes
        schedule = build_schedule(
            self.args,
            iterations=sizes.iterations,
            iterations_per_epoch=sizes.iterations_per_epoch,
        )
        return RunHooks(
            self,
            schedule=schedule,
            screen=screen,
            recorder=build_recorder(self.args.save_rollouts, self.engine.sampling, self.learner),
            token_log=build_token_log(self.args, schedule, self.learner, self.tokenizer),
        )

    def check_first_batch(self, rollout: Rollout, reward_output: RewardOutput) -> None:
        """Run the preflight checks, unless they are turned off."""
        if not self.args.preflight:
            return
        low = self.learner.low_precision or self.args.tf32
        length, alias = "response_length", self.args.length_option
        warnings = preflight(
            rollout,
            reward_output,
            engine=self.engine.rollout_engine,
            learner=self.learner,
            algorithm=self.engine.algorithm,
            kl_coef=self.engine.kl.value,
            fresh_reference=self.fresh_reference,
            sampling=self.engine.sampling,
            length_option=length if alias == length else f"{length} ({alias})",
            decode=getattr(self.tokenizer, "decode", None),
            tolerance=LOW_PRECISION if low else FULL_PRECISION,
        )
        for warning in warnings if self.learner.rank == 0 else []:
            logger.warning("preflight: %s", warning)

    def _open_trackers(self) -> Screen | None:
        """Open the files and the screen on rank 0."""
        if not self.callbacks.state.is_world_process_zero:
            return None
        screen = Screen(
            self.engine.batch_sizes.iterations,
            start=self.engine.step,
            bar=not self.args.disable_tqdm,
            tables=self.args.num_sample_generations > 0,
            max_rows=printed_rows(self.args),
        )
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
            settings=resume_fingerprint(self.args, engine, self.learner),
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
        """The output folder."""
        if not self.args.output_dir:
            raise ConfigError("output_dir must be set to write checkpoints")
        return Path(self.args.output_dir)
