"""The state of a classic run as a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kedge.backends.hf.fingerprint import fingerprint
from kedge.engine.checkpoint import checkpoint
from kedge.errors import CheckpointError

if TYPE_CHECKING:
    from kedge.classic.trainer import PPOTrainer


def save(trainer: PPOTrainer, output_dir: str | Path) -> Path:
    """Write ``output_dir/checkpoint-N``; see ``PPOTrainer.save_state``."""
    updater, learner = trainer._updater, trainer.learner
    state = updater.state_dict()
    parts = {
        "step": state["step"],
        "learner": state["learner"],
        "kl": state["kl"],
        "running": trainer.running.state_dict(),
        "reference": {"fingerprint": _reference(trainer)},
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
    """Resume from a checkpoint, or from the newest good one in a folder of them."""
    found, total = Path(folder), trainer.learner.total
    if found.name.startswith("checkpoint-"):
        checkpoint.load_one(found, lambda each: _take_over(trainer, each))
        return
    newest = checkpoint.load_latest(
        found,
        lambda each: _take_over(trainer, each),
        anywhere=lambda failed: bool(total(torch.tensor([float(failed)])).item()),
    )
    if newest is None:
        raise CheckpointError(f"{folder} holds no checkpoint; give the folder save_state wrote")


def _take_over(trainer: PPOTrainer, folder: Path) -> None:
    learner = trainer.learner
    held = checkpoint.load(folder, rank=learner.rank, world_size=learner.world_size, verified=True)
    parts = held.parts
    _check(trainer, str(parts["reference"]["fingerprint"]), folder)
    trainer._updater.load_state_dict({k: parts[k] for k in ("step", "learner", "kl")})
    trainer.running.load_state_dict(parts["running"])
    trainer.highest_reward = parts["best"]["score"]
    trainer._since_best = int(parts["best"]["calls"])
    if held.local is not None:
        set_random_state(held.local["random"])


def _reference(trainer: PPOTrainer) -> str:
    """A short hash of what the policy is held to: the reference, or the base of an adapter."""
    held = trainer.model if trainer.ref_model is None else trainer.ref_model
    inner = getattr(held, "pretrained_model", held)
    frozen = {n: p for n, p in inner.named_parameters() if not p.requires_grad}
    return fingerprint(frozen)


def _check(trainer: PPOTrainer, saved: str, folder: Path) -> None:
    if _reference(trainer) != saved:
        raise CheckpointError(
            f"the reference is not that of the saved run ({folder}): make the trainer with the "
            "model that the run began with, or pass that as ref_model, and load the state then"
        )


def random_state() -> dict[str, Any]:
    """The random states of this process."""
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            place,
            has_gauss,
            gauss,
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where ``random_state`` was called."""
    random.setstate(state["python"])
    name, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
