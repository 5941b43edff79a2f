"""Kedge trains language models with the PPO family of reinforcement learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "PPOTrainer": "kedge.trainers.ppo",
    "PPOConfig": "kedge.config.ppo",
    "PPOv2Trainer": "kedge.trainers.ppo",
    "PPOv2Config": "kedge.config.ppo",
    "Algorithm": "kedge.algorithms",
    "ppo": "kedge.algorithms",
}

__all__ = [
    "Algorithm",
    "PPOConfig",
    "PPOTrainer",
    "PPOv2Config",
    "PPOv2Trainer",
    "__version__",
    "ppo",
]

if TYPE_CHECKING:
    from kedge.algorithms import Algorithm, ppo
    from kedge.config.ppo import PPOConfig, PPOv2Config
    from kedge.trainers.ppo import PPOTrainer, PPOv2Trainer


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(
            f"module 'kedge' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
