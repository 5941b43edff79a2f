"""PPO one step at a time: ``generate``, score as you like, ``step``.

The step API of TRL 0.4 to 0.11, on Kedge's core.
"""

from typing import Any

from kedge.ext.trl.classic import core
from kedge.ext.trl.classic.config import AdaptiveKLController, FixedKLController, PPOConfig
from kedge.ext.trl.classic.core import LengthSampler, respond_to_batch, set_seed
from kedge.ext.trl.classic.models import (
    SUPPORTED_ARCHITECTURES,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
    ValueHead,
    create_reference_model,
    unwrap_model_for_generation,
)
from kedge.ext.trl.classic.trainer import PPOTrainer
from kedge.math.running import RunningMoments

__all__ = [
    "SUPPORTED_ARCHITECTURES",
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


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"module 'kedge.classic' has no attribute {name!r}; it has {', '.join(__all__)}"
    )
