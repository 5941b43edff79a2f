"""Names and defaults of TRL 0.4 to 0.11: the step API, and the first PPOv2 and RLOO."""

from __future__ import annotations

from kedge.ext.trl.classic import PPOConfig, PPOTrainer
from kedge.ext.trl.ppov2 import PPOv2Config, PPOv2Trainer
from kedge.ext.trl.v0_17 import RLOOConfig, RLOOTrainer

__all__ = ["PPOConfig", "PPOTrainer", "PPOv2Config", "PPOv2Trainer", "RLOOConfig", "RLOOTrainer"]
