"""Output folders and files of a run: checks, locks, models, resume fingerprints, recorders."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from transformers.utils import logging

from kedge.checkpoint.checkpoint import checkpoints
from kedge.config.base import OnPolicyConfig
from kedge.config.declare import resume_values
from kedge.data import DatasetPrompts
from kedge.errors import CheckpointError, ConfigError, way_out
from kedge.types import Sampling

if TYPE_CHECKING:
    from kedge.learner.learner import HFLearner
    from kedge.loop.loop import Engine

VALUE_FOLDER = "value_model"


def check_targets(args: Any) -> None:
    """Check that output folders can be created and written to."""
    from kedge.output import check_folder

    reports = args.report_to if isinstance(args.report_to, list) else [args.report_to]
    targets = {
        "output_dir": args.output_dir,
        "save_rollouts": getattr(args, "save_rollouts", None),
        "logging_dir": (
            getattr(args, "logging_dir", None) if {"tensorboard", "all"} & set(reports) else None
        ),
    }
    for option, folder in targets.items():
        if folder:
            check_folder(option, folder)


@contextlib.contextmanager
def lock_output_dir(args: Any) -> Iterator[None]:
    """Context that locks ``output_dir``; every rank calls it, rank 0 locks."""
    from kedge.output import RunLock

    with contextlib.ExitStack() as stack:
        problem = None
        if args.output_dir and args.process_index == 0:
            try:
                stack.enter_context(RunLock(args.output_dir))
            except ConfigError as error:
                problem = str(error)
        if args.world_size > 1:
            (problem,) = broadcast_object_list([problem])
        if problem is not None:
            raise ConfigError(problem)
        yield


def write_models(folder: Path, learner: HFLearner, tokenizer: Any) -> None:
    """Write policy, tokenizer and value model in the layout of ``from_pretrained``.

    Every rank calls it; rank 0 writes.
    """
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would interrupt the run's own bar
    try:
        learner.save(folder, folder / VALUE_FOLDER)
        if learner.accelerator.is_main_process and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
    except Exception as error:
        # tokenizers raises a bare Exception for file-system errors
        if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
            raise CheckpointError(
                f"cannot write the models to {folder}: {error}; {way_out(error)}, or pass another"
                " folder to save_model()"
            ) from error
        raise
    finally:
        if bars:
            logging.enable_progress_bar()


def earlier_run(output_dir: Path, *, overwrite: bool) -> list[Path]:
    """Checkpoints of an earlier run that a new run in the folder removes."""
    existing = checkpoints(output_dir)
    if existing and not overwrite:
        raise CheckpointError(
            f"{output_dir} holds {', '.join(p.name for p in existing[-3:])} of an earlier run;"
            " continue it with resume_from_checkpoint=True (--resume_from_checkpoint), start over"
            " with overwrite_output_dir=True (--overwrite_output_dir), or set another output_dir"
        )
    return existing


def resume_fingerprint(args: OnPolicyConfig, engine: Engine, learner: HFLearner) -> dict[str, Any]:
    """Everything that affects the numerics, as JSON values; compared on resume.

    Options, prompts and the reference's weights, but not sizes that only cut the same batch into
    other micro-batches.
    """
    sizes = engine.batch_sizes
    values: dict[str, Any] = {
        "algorithm": engine.algorithm.name,
        "iterations": sizes.iterations,
        "batch_size": sizes.batch_size,
        "num_mini_batches": sizes.minibatches,
        "num_ppo_epochs": sizes.epochs,
        "num_generations": sizes.group,
        "optim": type(learner.optimizer).__name__,
        "stop_ids": engine.sampling.stop_ids,
    }
    if isinstance(engine.source, DatasetPrompts):
        values["prompts"] = engine.source.fingerprint()
    if learner.reference is not None:
        values["reference"] = learner.reference.fingerprint()
    values = resume_values(args) | values
    return json.loads(json.dumps(values, default=str))


def recording_fingerprint(sampling: Sampling) -> dict[str, Any]:
    """Settings that a recording and a replaying run must share."""
    return {"temperature": sampling.temperature, "stop_ids": [*sampling.stop_ids]}
