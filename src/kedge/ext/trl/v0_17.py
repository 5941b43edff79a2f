"""Names and defaults of TRL 0.12 to 0.21."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kedge.config import rloo
from kedge.config.dialect import Alias, Dialect
from kedge.ext.trl import options
from kedge.ext.trl.compat.trl_trainers import GRPOTrainer, PPOTrainer, PPOv2Trainer, RLOOTrainer
from kedge.ext.trl.options import GRPOConfig, PPOConfig
from kedge.ext.trl.ppov2 import PPOv2Config

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PPOv2Config",
    "PPOv2Trainer",
    "RLOOConfig",
    "RLOOTrainer",
]


@dataclass(repr=False)
class RLOOConfig(Dialect, rloo.RLOOConfig):
    """Options of ``RLOOTrainer``."""

    NAMES: ClassVar[Mapping[str, Any]] = {**options.TRL, "rloo_k": Alias("num_generations")}
