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


def resume_run(run: Run, asked: str | Path | bool | None) -> Path | None:
    """Load a checkpoint if asked to; returns its folder, or None to start from the beginning.

    Args:
        run: is given the checkpoint's state.
        asked: True for the newest in ``output_dir`` that can be loaded, or a folder.

    Raises:
        CheckpointError: there is none, or it is damaged or of another run.
    """
    if not asked:
        return None
    if not isinstance(asked, bool | str | Path):
        raise ConfigError(
            f"resume_from_checkpoint={asked!r} must be True, for the newest, or a folder"
        )
    if not isinstance(asked, bool):
        checkpoint.load_one(asked, lambda folder: _take_over(run, folder))
        return Path(asked)
    total, root = run.learner.total, run.root()
    found = checkpoint.load_latest(
        root,
        lambda folder: _take_over(run, folder),
        anywhere=lambda failed: bool(total(torch.tensor([float(failed)])).item()),
    )
    if found is None:
        raise CheckpointError(
            f"resume_from_checkpoint=True, but {root} holds no checkpoint; leave it unset to start"
            " from the beginning"
        )
    return found


def _take_over(run: Run, folder: Path) -> None:
    """Load a checkpoint whose files are whole."""
    accelerator = run.learner.accelerator
    found = checkpoint.load(
        folder,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        settings=resume_fingerprint(run.settings, run.engine, run.learner),
        verified=True,
    )
    if not found.parts:
        raise CheckpointError(
            f"{folder} was written with save_only_model=True: it holds the models but not the"
            " optimizer, so training cannot resume from it; pass its folder as `model`"
        )
    run.engine.load_state_dict(dict(found.parts))
    run.engine.restore([unpack(sample) for sample in found.local or []])
    run.callbacks.restore(folder)
