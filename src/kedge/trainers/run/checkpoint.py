"""Model files, and the parts of a checkpoint that are records."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging

from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.learner import HFLearner
from kedge.config.resolve import RunSettings
from kedge.engine.checkpoint.checkpoint import checkpoints
from kedge.engine.checkpoint.replay import Recorder
from kedge.engine.loop import Engine
from kedge.errors import CheckpointError, way_out
from kedge.trainers.reporting.best_effort import required_write

VALUE_FOLDER = "value_model"


def write_models(folder: Path, learner: HFLearner, tokenizer: Any) -> None:
    """Policy, tokenizer and value model, in the layout that ``from_pretrained`` reads.

    Every rank calls it; rank 0 writes.

    Raises:
        CheckpointError: the disk refused.
    """
    try:
        with _no_bars():  # they would cut through the progress of the run
            learner.save(folder, folder / VALUE_FOLDER)
            if learner.accelerator.is_main_process and hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(folder)
    except Exception as error:
        # tokenizers reports what the disk says as a bare Exception
        if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
            raise CheckpointError(
                f"the models could not be written to {folder}: {error}; {way_out(error)}, or"
                " give save_model() another folder"
            ) from error
        raise


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def earlier_run(output_dir: Path, *, overwrite: bool) -> list[Path]:
    """Checkpoints of another run in a folder where a new one starts: to be removed.

    Raises:
        CheckpointError: there are some, and they may not be removed.
    """
    found = checkpoints(output_dir)
    if found and not overwrite:
        raise CheckpointError(
            f"{output_dir} holds {', '.join(p.name for p in found[-3:])} of an earlier run; go on "
            "from there with resume_from_checkpoint=True, start over with "
            "overwrite_output_dir=True, or name another output_dir"
        )
    return found


_NO_NUMBERS = {
    *("preflight", "save_rollouts", "replay_rollouts", "compile", "num_proc", "chunk"),
    *("completions", "success", "against_start"),
}


def resume_fingerprint(settings: RunSettings, engine: Engine, learner: HFLearner) -> dict[str, Any]:
    """What changes numbers, as JSON values, for comparison when a run goes on.

    Settings, the prompts and the reference's weights.  Sizes that only cut the same batch into
    other pieces are left out.
    """
    plan = engine.batch_sizes
    named: dict[str, Any] = {
        "algorithm": engine.algorithm.name,
        "updates": plan.updates,
        "batch_size": plan.batch_size,
        "num_mini_batches": plan.minibatches,
        "num_ppo_epochs": plan.epochs,
        "num_generations": plan.group,
        "optim": type(learner.optimizer).__name__,
    }
    if isinstance(engine.source, DatasetPrompts):
        named["prompts"] = engine.source.fingerprint()
    if learner.reference is not None:
        named["reference"] = learner.reference.fingerprint()
    for part, value in asdict(settings).items():
        if part == "batch":
            continue
        for name, each in value.items() if isinstance(value, dict) else [(part, value)]:
            # Learner and value both have a learning_rate; a bare name is the learner's.
            full = f"value_{name}" if part == "value" else name
            if name not in _NO_NUMBERS:
                named[full] = each
    return json.loads(json.dumps(named, default=str))


def recording_fingerprint(settings: RunSettings) -> dict[str, Any]:
    """What a recording of rollouts must agree with to be trained from."""
    return {"temperature": settings.sampling.temperature, "stop_ids": [*settings.sampling.stop_ids]}


def build_recorder(settings: RunSettings, learner: HFLearner) -> Recorder | None:
    """What records the rollouts of this rank, if ``save_rollouts`` asks for it.

    Raises:
        ConfigError: its folder cannot be made.
    """
    folder = settings.save_rollouts
    if folder is None:
        return None
    with required_write("save_rollouts", folder):
        return Recorder(
            folder,
            about=recording_fingerprint(settings),
            rank=learner.rank,
            world_size=learner.world_size,
        )
