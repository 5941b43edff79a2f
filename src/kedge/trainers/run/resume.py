"""Resuming a run from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.engine.checkpoint import checkpoint
from kedge.engine.checkpoint.replay import unpack
from kedge.errors import CheckpointError, ConfigError
from kedge.trainers.run.checkpoint import resume_fingerprint

if TYPE_CHECKING:
    from kedge.trainers.run.run import Run


def resume_run(run: Run, resume: str | Path | bool | None) -> Path | None:
    """Load a checkpoint if requested; return its folder, or None to start from the beginning.

    Args:
        run: receives the checkpoint's state.
        resume: True for the newest loadable one in ``output_dir``, or a folder.
    """
    if not resume:
        return None
    if not isinstance(resume, bool | str | Path):
        raise ConfigError(
            f"resume_from_checkpoint={resume!r} must be True (newest checkpoint) or a folder"
        )
    if not isinstance(resume, bool):
        checkpoint.load_one(resume, lambda folder: _load_into(run, folder))
        return Path(resume)
    total, root = run.learner.total, run.root()
    newest = checkpoint.load_latest(
        root,
        lambda folder: _load_into(run, folder),
        anywhere=lambda failed: bool(total(torch.tensor([float(failed)])).item()),
    )
    if newest is None:
        raise CheckpointError(
            f"resume_from_checkpoint=True, but {root} has no checkpoint; leave it unset to start"
            " from the beginning"
        )
    return newest


def _load_into(run: Run, folder: Path) -> None:
    """Load a checkpoint whose files are verified."""
    accelerator = run.learner.accelerator
    saved = checkpoint.load(
        folder,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        settings=resume_fingerprint(run.args, run.engine, run.learner),
        verified=True,
    )
    if not saved.parts:
        raise CheckpointError(
            f"{folder} was written with save_only_model=True and has no optimizer state to resume"
            " from; to start a new run from its weights, pass it as `model`"
        )
    run.engine.load_state_dict(dict(saved.parts))
    run.engine.restore([unpack(sample) for sample in saved.local or []])
    run.callbacks.restore(folder)
