"""Kedge trains language models with the PPO family of reinforcement learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kedge import forwards
from kedge.trainers import TRAINERS

if TYPE_CHECKING:  # for type checkers; at run time a name is imported when it is first used
    __version__: str
    from kedge.algorithms import Algorithm as Algorithm
    from kedge.algorithms import grpo as grpo
    from kedge.algorithms import ppo as ppo
    from kedge.algorithms import reinforce_pp as reinforce_pp
    from kedge.algorithms import remax as remax
    from kedge.algorithms import rloo as rloo
    from kedge.config.grpo import GRPOConfig as GRPOConfig
    from kedge.config.ppo import PPOConfig as PPOConfig
    from kedge.config.rloo import RLOOConfig as RLOOConfig
    from kedge.ext.open_instruct.config import AsyncPPOConfig as AsyncPPOConfig
    from kedge.ext.open_instruct.trainer import AsyncPPOTrainer as AsyncPPOTrainer
    from kedge.ext.trl.ppov2 import PPOv2Config as PPOv2Config
    from kedge.ext.trl.ppov2 import PPOv2Trainer as PPOv2Trainer
    from kedge.ext.trl.scripts import ModelConfig as ModelConfig
    from kedge.ext.trl.scripts import ScriptArguments as ScriptArguments
    from kedge.ext.trl.scripts import TrlParser as TrlParser
    from kedge.ext.trl.scripts import get_kbit_device_map as get_kbit_device_map
    from kedge.ext.trl.scripts import get_peft_config as get_peft_config
    from kedge.ext.trl.scripts import get_quantization_config as get_quantization_config
    from kedge.trainers.grpo import GRPOTrainer as GRPOTrainer
    from kedge.trainers.ppo import PPOTrainer as PPOTrainer
    from kedge.trainers.rloo import RLOOTrainer as RLOOTrainer

_OF_TRL = ("get_kbit_device_map", "get_peft_config", "get_quantization_config")
_MODULES = {
    **dict.fromkeys(("grpo", "ppo", "reinforce_pp", "remax", "rloo"), "kedge.algorithms"),
    **dict.fromkeys(("ModelConfig", "ScriptArguments", "TrlParser", *_OF_TRL), "kedge.trl_scripts"),
    "Algorithm": "kedge.algorithms",
    "PPOv2Trainer": "kedge.trl.ppov2",
    "PPOv2Config": "kedge.trl.ppov2",
}
for _module, _trainer in (path.split(":") for path, _ in TRAINERS.values()):
    _MODULES[_trainer] = _module
    _MODULES[_trainer.replace("Trainer", "Config")] = _module.replace(".trainers.", ".config.")
_MODULES["AsyncPPOConfig"] = "kedge.ext.open_instruct.config"

forwards.install()

__all__ = sorted([*_MODULES, "__version__"])  # noqa: PLE0605


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

    from kedge.errors import DISTRIBUTION

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__
