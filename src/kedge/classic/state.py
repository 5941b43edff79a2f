"""Checkpoints of the classic trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kedge.checkpoint import checkpoint
from kedge.errors import CheckpointError
from kedge.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from kedge.classic.trainer import PPOTrainer


_UPDATER = ("step", "learner", "kl")


def save(trainer: PPOTrainer, output_dir: str | Path) -> Path:
    """Write ``output_dir/checkpoint-N``; see ``PPOTrainer.save_state``."""
    updater, learner = trainer._updater, trainer.learner
    state = updater.state_dict()
    parts = {
        **{name: state[name] for name in _UPDATER},
        "running": trainer.running.state_dict(),
        "reference": {"fingerprint": _reference_fingerprint(trainer)},
        "best": {"score": trainer.highest_reward, "calls": trainer._since_best},
    }
    return checkpoint.save(
        output_dir,
        updater.step,
        parts,
        local={"random": random_state()},
        rank=learner.rank,
        world_size=learner.world_size,
        barrier=trainer.accelerator.wait_for_everyone,
    )


def load(trainer: PPOTrainer, folder: str | Path) -> None:
    """Resume from a checkpoint, or from the newest intact one in a folder."""
    path, total = Path(folder), trainer.learner.total
    if path.name.startswith("checkpoint-"):
        checkpoint.load_one(path, lambda candidate: _restore(trainer, candidate))
        return
    newest = checkpoint.load_latest(
        path,
        lambda candidate: _restore(trainer, candidate),
        anywhere=lambda failed: bool(total(torch.tensor([float(failed)])).item()),
    )
    if newest is None:
        raise CheckpointError(
            f"{folder} has no checkpoint; pass the folder that save_state wrote to"
        )


def _restore(trainer: PPOTrainer, folder: Path) -> None:
    learner = trainer.learner
    saved_state = checkpoint.load(
        folder, rank=learner.rank, world_size=learner.world_size, verified=True
    )
    parts = saved_state.parts
    if _reference_fingerprint(trainer) != str(parts["reference"]["fingerprint"]):
        raise CheckpointError(
            f"the reference differs from that of the checkpoint {folder}; create the trainer with "
            "the model that the run started from, or pass that as ref_model, then load the state"
        )
    trainer._updater.load_state_dict({name: parts[name] for name in _UPDATER})
    trainer.running.load_state_dict(parts["running"])
    trainer.highest_reward = parts["best"]["score"]
    trainer._since_best = int(parts["best"]["calls"])
    if saved_state.local is not None:
        set_random_state(saved_state.local["random"])


def _reference_fingerprint(trainer: PPOTrainer) -> str:
    """A short hash of the reference: its weights, or those of the adapter's base."""
    model = trainer.model if trainer.ref_model is None else trainer.ref_model
    inner = getattr(model, "pretrained_model", model)
    frozen = {n: p for n, p in inner.named_parameters() if not p.requires_grad}
    return fingerprint(frozen)


def random_state() -> dict[str, Any]:
    """The random states of this process."""
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state = {
        "python": random.getstate(),
        "numpy": [name, words, place, has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the random states of ``random_state``."""
    random.setstate(state["python"])
    name, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
