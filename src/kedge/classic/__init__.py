"""PPO one step at a time: ``generate``, score as you like, ``step``.

The step API of TRL 0.4 to 0.11, on Kedge's core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "PPOTrainer": "trainer",
    "PPOConfig": "config",
    "AutoModelForCausalLMWithValueHead": "models.wrapper",
    "AutoModelForSeq2SeqLMWithValueHead": "models.wrapper",
    "PreTrainedModelWrapper": "models.wrapper",
    "unwrap_model_for_generation": "models.wrapper",
    "ValueHead": "models.value_head",
    "create_reference_model": "models.reference",
    "set_seed": "core",
    "LengthSampler": "core",
    "respond_to_batch": "core",
    "AdaptiveKLController": "config",
    "FixedKLController": "config",
    "RunningMoments": "scores",
}

__all__ = [
    "AdaptiveKLController",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "FixedKLController",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "RunningMoments",
    "ValueHead",
    "core",
    "create_reference_model",
    "respond_to_batch",
    "set_seed",
    "unwrap_model_for_generation",
]

if TYPE_CHECKING:
    from kedge.classic import core
    from kedge.classic.config import AdaptiveKLController, FixedKLController, PPOConfig
    from kedge.classic.core import LengthSampler, respond_to_batch, set_seed
    from kedge.classic.models.reference import create_reference_model
    from kedge.classic.models.value_head import ValueHead
    from kedge.classic.models.wrapper import (
        AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead,
        PreTrainedModelWrapper,
        unwrap_model_for_generation,
    )
    from kedge.classic.scores import RunningMoments
    from kedge.classic.trainer import PPOTrainer


def __getattr__(name: str) -> Any:
    if name == "core":
        return importlib.import_module("kedge.classic.core")
    if name not in _WHERE:
        raise AttributeError(
            f"module 'kedge.classic' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"kedge.classic.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
