"""Writes checkpoints when a callback, a signal or a failure asks for it, and resumes from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kedge.checkpoint import checkpoint
from kedge.data import DatasetPrompts
from kedge.data.stream import StreamPrompts
from kedge.loop.shutdown import GracefulShutdown
from kedge.records.errors import CheckpointError, ConfigError
from kedge.records.protocols import Hook
from kedge.records.types import StepReport
from kedge.trainers.hf_callbacks import share_control
from kedge.trainers.hooks.parts import RunParts


def earlier_run(output_dir: Path, *, overwrite: bool) -> list[Path]:
    """Checkpoints of an earlier run that a new run in the folder removes."""
    existing = checkpoint.checkpoints(output_dir)
    if existing and not overwrite:
        raise CheckpointError(
            f"{output_dir} holds {', '.join(p.name for p in existing[-3:])} of an earlier run;"
            " continue it with resume_from_checkpoint=True (--resume_from_checkpoint), start over"
            " with overwrite_output_dir=True (--overwrite_output_dir), or set another output_dir"
        )
    return existing


@dataclass(kw_only=True)
class Checkpoints(RunParts, Hook):
    """The last hook: it also tells the loop that a callback, a signal or a finding stops it."""

    shutdown: GracefulShutdown = field(default_factory=GracefulShutdown)
    last: int = 0  # iterations in the newest checkpoint, or when ``train`` was called

    @property
    def root(self) -> Path:
        """The output folder."""
        if not self.args.output_dir:
            raise ConfigError("output_dir must be set to write checkpoints")
        return Path(self.args.output_dir)

    # -- during training ------------------------------------------------------------------------

    def on_step_end(self, report: StepReport) -> bool:
        """Save if a callback or a signal asks for it."""
        return self.on_epoch_end()

    def on_epoch_end(self) -> bool:
        """Save if a callback or a signal asks for it."""
        control = self.callbacks.control
        if self.shutdown.requested or self.trainer.stopped_by:
            control.should_training_stop = True
            control.should_save |= self.last < self.state.global_step
        if self.learner.world_size > 1:  # an evaluation may have taken minutes
            share_control(control, self.learner.all_reduce)
        if control.should_save and self.args.output_dir:
            self.save()
            self.callbacks.fire("on_save")
        return self.callbacks.control.should_training_stop

    def on_failure(self, step: int, error: Exception) -> None:
        """Save iterations that no checkpoint holds yet, and say how to resume."""
        args = self.args
        if step <= self.last or isinstance(error, CheckpointError):
            return
        since = f"training stopped after iteration {step} with {type(error).__name__}"
        if not args.output_dir or args.save_strategy == "no":
            why = "save_strategy='no'" if args.output_dir else "output_dir is not set"
            self.warn(
                f"{since}; no checkpoint is written because {why}: unsaved iterations are lost"
            )
            return
        try:
            folder = self.save()
        except Exception as other:
            self.warn(f"{since}, and saving a checkpoint failed: {other}")
            return
        self.warn(
            f"{since}; the models are in {folder} (save_only_model=True)"
            if args.save_only_model
            else f"{since}; no completed iteration is lost. Fix the cause and resume from {folder}"
            " with train(resume_from_checkpoint=True), or --resume_from_checkpoint on the command"
            " line"
        )

    # -- writing --------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write ``checkpoint-N``, and remove the oldest ones beyond ``save_total_limit``."""
        state = self.state
        best = self.root / f"checkpoint-{state.best_global_step}"
        if state.best_global_step == state.global_step or best.is_dir():
            state.best_model_checkpoint = str(best)
        saved = self.write()
        if state.is_world_process_zero:
            keep = (saved, state.best_model_checkpoint)
            checkpoint.rotate(self.root, self.args.save_total_limit, keep=keep)
        self.last = state.global_step
        return saved

    def write(self) -> Path:
        """Write ``checkpoint-N`` into the output folder; atomic if the process is killed."""
        from kedge.checkpoint.replay import pack

        engine, accelerator = self.engine, self.learner.accelerator
        parts = {} if self.args.save_only_model else engine.state_dict()
        if parts and isinstance(engine.source, StreamPrompts):
            parts["prompts"] = engine.source.state_dict(engine.step)
        in_flight = [pack(sample) for sample in engine.in_flight]
        return checkpoint.save(
            self.root,
            engine.step,
            parts,
            local=in_flight or None,
            settings=self._fingerprint(),
            write_models=self._write_models,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            barrier=accelerator.wait_for_everyone,
        )

    def _write_models(self, folder: Path) -> None:
        self.trainer.save_model(str(folder), _internal_call=True)
        if self.state.is_world_process_zero:
            self.callbacks.write_state(folder)

    def _fingerprint(self) -> dict[str, Any]:
        """Everything that affects the numerics, as JSON values; compared on resume.

        Options, prompts and the reference's weights, but not sizes that only cut the same batch
        into other micro-batches.
        """
        engine, sizes = self.engine, self.engine.batch_sizes
        values = self.args.resume_values() | {
            "algorithm": engine.algorithm.name,
            "iterations": sizes.iterations,
            "batch_size": sizes.batch_size,
            "num_mini_batches": sizes.minibatches,
            "num_ppo_epochs": sizes.epochs,
            "num_generations": sizes.group,
            "optim": type(self.learner.optimizer).__name__,
            "stop_ids": engine.sampling.stop_ids,
        }
        if isinstance(engine.source, DatasetPrompts):
            values["prompts"] = engine.source.fingerprint()
        if self.learner.reference is not None:
            values["reference"] = self.learner.reference.fingerprint()
        return json.loads(json.dumps(values, default=str))

    # -- reading --------------------------------------------------------------------------------

    def tidy(self, *, new_run: bool) -> None:
        """Remove incomplete files of a killed run, and old checkpoints that a new run replaces."""
        if not self.args.output_dir:
            return
        accelerator = self.learner.accelerator
        if accelerator.is_main_process:
            checkpoint.tidy(self.root)
        accelerator.wait_for_everyone()
        first = new_run and self.engine.step == 0
        old = earlier_run(self.root, overwrite=self.args.overwrite_output_dir) if first else []
        accelerator.wait_for_everyone()  # wait until every rank has looked
        for folder in old if accelerator.is_main_process else []:
            shutil.rmtree(folder)
        accelerator.wait_for_everyone()

    def resume(self, resume: str | Path | bool) -> Path:
        """Load a checkpoint; return its folder."""
        if not isinstance(resume, bool | str | Path):
            raise ConfigError(
                f"resume_from_checkpoint={resume!r} must be True (newest checkpoint) or a folder"
            )
        if not isinstance(resume, bool):
            checkpoint.load_one(resume, self._load)
            return Path(resume)
        total = self.learner.all_reduce
        newest = checkpoint.load_latest(
            self.root,
            self._load,
            anywhere=lambda failed: bool(total(torch.tensor([float(failed)])).item()),
        )
        if newest is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but {self.root} has no checkpoint; leave it unset to"
                " start from the beginning"
            )
        return newest

    def _load(self, folder: Path) -> None:
        """Load a checkpoint whose files are verified."""
        from kedge.checkpoint.replay import unpack

        accelerator = self.learner.accelerator
        saved = checkpoint.load(
            folder,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            settings=self._fingerprint(),
            verified=True,
        )
        if not saved.parts:
            raise CheckpointError(
                f"{folder} was written with save_only_model=True and has no optimizer state to"
                " resume from; to start a new run from its weights, pass it as `model`"
            )
        self.engine.load_state_dict(dict(saved.parts))
        if isinstance(self.engine.source, StreamPrompts):
            self.engine.source.load_state_dict(saved.parts.get("prompts", {}))
        self.engine.restore([unpack(sample) for sample in saved.local or []])
        self.callbacks.restore(folder)

    def load_best(self) -> None:
        """Load the weights of the best checkpoint, with ``load_best_model_at_end``."""
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or best is None:
            return
        saved = checkpoint.load(best)
        if not saved.parts:
            raise ConfigError("load_best_model_at_end=True needs save_only_model=False")
        with checkpoint.report_damage(Path(best)):
            self.learner.load_state_dict(saved.parts["learner"])
        rollout_engine = self.engine.rollout_engine
        if not rollout_engine.shares_weights:
            rollout_engine.load_weights(self.learner.weights(), self.learner.version)
