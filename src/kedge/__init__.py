"""Kedge trains language models with the PPO family of reinforcement learning."""

from __future__ import annotations

import importlib
from typing import Any

from kedge import forwards
from kedge.trainers import TRAINERS

_OF_MODELS = ("ModelConfig", "get_peft_config", "get_quantization_config")
_MODULES = {
    **dict.fromkeys(("grpo", "ppo", "reinforce_pp", "remax", "rloo"), "kedge.algorithms"),
    **dict.fromkeys(_OF_MODELS, "kedge.cli.model_arguments"),
    **dict.fromkeys(("ScriptArguments", "TrlParser", "get_kbit_device_map"), "kedge.trl_scripts"),
    "Algorithm": "kedge.algorithms",
    "PPOv2Trainer": "kedge.trl.ppov2",
    "PPOv2Config": "kedge.trl.ppov2",
}
for _module, _trainer in (path.split(":") for path, _ in TRAINERS.values()):
    _MODULES[_trainer] = _module
    _MODULES[_trainer.replace("Trainer", "Config")] = _module.replace(".trainers.", ".config.")
_MODULES["AsyncPPOTrainer"] = "kedge.ext.open_instruct.trainer"
_MODULES["AsyncPPOConfig"] = "kedge.ext.open_instruct.config"

forwards.install()

__all__ = sorted([*_MODULES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from kedge.records.errors import package_version

        return package_version()
    if name not in _MODULES:
        raise AttributeError(
            f"module 'kedge' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
