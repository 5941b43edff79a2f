"""Public trainers: thin shells over the engine."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from kedge import plugins
from kedge.records.errors import ConfigError

if TYPE_CHECKING:
    from kedge.trainers.base import TrainerShell

# Command -> its trainer, and its line in ``kedge --help``.
TRAINERS = {
    "ppo": ("kedge.trainers.ppo:PPOTrainer", "train a language model with PPO"),
    "rloo": (
        "kedge.trainers.rloo:RLOOTrainer",
        "train with RLOO: several responses per prompt, no value model",
    ),
    "grpo": ("kedge.trainers.grpo:GRPOTrainer", "train with GRPO or one of its variants"),
}


def trainer_commands() -> list[str]:
    """The commands that train: the core's, and those of entry points."""
    return [*TRAINERS, *(name for name in plugins.find("kedge.trainers") if name not in TRAINERS)]


def load_trainer(command: str) -> type[TrainerShell]:
    """Import the trainer of a command."""
    trainer: type[TrainerShell] | None = (
        resolve_name(TRAINERS[command][0])
        if command in TRAINERS
        else plugins.load("kedge.trainers", command)
    )
    if trainer is None:
        raise ConfigError(f"no trainer {command!r} (trainers: {', '.join(trainer_commands())})")
    return trainer


def find_trainer(config: Any) -> type[TrainerShell]:
    """The trainer for a config's class, or for its nearest parent class."""
    found = [load_trainer(name) for name in TRAINERS]
    if type(config) not in {trainer.SPEC.config for trainer in found}:
        loaded = (plugins.load("kedge.trainers", name) for name in plugins.find("kedge.trainers"))
        found += [trainer for trainer in loaded if trainer is not None]
    trainers = {trainer.SPEC.config: trainer for trainer in found}
    return next(trainers[base] for base in type(config).__mro__ if base in trainers)
