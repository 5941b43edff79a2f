"""Kedge trains language models with the PPO family of reinforcement learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "PPOTrainer": "kedge.trainers.ppo",
    "PPOConfig": "kedge.config.ppo",
    "AsyncPPOTrainer": "kedge.trainers.async_ppo",
    "AsyncPPOConfig": "kedge.config.async_ppo",
    "PPOv2Trainer": "kedge.trainers.ppo",
    "PPOv2Config": "kedge.config.ppo",
    "RLOOTrainer": "kedge.trainers.rloo",
    "RLOOConfig": "kedge.config.rloo",
    "GRPOTrainer": "kedge.trainers.grpo",
    "GRPOConfig": "kedge.config.grpo",
    "ModelConfig": "kedge.trl_scripts",
    "ScriptArguments": "kedge.trl_scripts",
    "TrlParser": "kedge.trl_scripts",
    "get_kbit_device_map": "kedge.trl_scripts",
    "get_peft_config": "kedge.trl_scripts",
    "get_quantization_config": "kedge.trl_scripts",
    "Algorithm": "kedge.algorithms",
    "grpo": "kedge.algorithms",
    "ppo": "kedge.algorithms",
    "reinforce_pp": "kedge.algorithms",
    "remax": "kedge.algorithms",
    "rloo": "kedge.algorithms",
}

__all__ = [
    "Algorithm",
    "AsyncPPOConfig",
    "AsyncPPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "PPOConfig",
    "PPOTrainer",
    "PPOv2Config",
    "PPOv2Trainer",
    "RLOOConfig",
    "RLOOTrainer",
    "ScriptArguments",
    "TrlParser",
    "__version__",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "grpo",
    "ppo",
    "reinforce_pp",
    "remax",
    "rloo",
]

if TYPE_CHECKING:
    __version__: str
    from kedge.algorithms import Algorithm, grpo, ppo, reinforce_pp, remax, rloo
    from kedge.config.async_ppo import AsyncPPOConfig
    from kedge.config.grpo import GRPOConfig
    from kedge.config.ppo import PPOConfig, PPOv2Config
    from kedge.config.rloo import RLOOConfig
    from kedge.trainers.async_ppo import AsyncPPOTrainer
    from kedge.trainers.grpo import GRPOTrainer
    from kedge.trainers.ppo import PPOTrainer, PPOv2Trainer
    from kedge.trainers.rloo import RLOOTrainer
    from kedge.trl_scripts import (
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(
            f"module 'kedge' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_MODULES[name]), name)


def _version() -> str:
    """The installed version; "0+unknown" for sources that were never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kedge")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
