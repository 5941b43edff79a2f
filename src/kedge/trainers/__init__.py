"""Public trainers: thin shells over the engine."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

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
    "async-ppo": (
        "kedge.ext.open_instruct.trainer:AsyncPPOTrainer",
        "train with asynchronous PPO: Ray and vLLM sample while the learners train",
    ),
}


def load_trainer(command: str) -> type[TrainerShell]:
    """Import the trainer of a command."""
    trainer: type[TrainerShell] = resolve_name(TRAINERS[command][0])
    return trainer


def find_trainer(config: Any) -> type[TrainerShell]:
    """The trainer for a config's class, or for its nearest parent class."""
    trainers = {trainer.SPEC.config: trainer for trainer in map(load_trainer, TRAINERS)}
    return next(trainers[base] for base in type(config).__mro__ if base in trainers)
