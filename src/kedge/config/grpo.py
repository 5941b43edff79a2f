"""Options of GRPOTrainer."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kedge.config.algorithms import GRPOArguments
from kedge.config.base import OnPolicyConfig

logger = logging.getLogger(__name__)


@dataclass(repr=False)
class GRPOConfig(GRPOArguments, OnPolicyConfig):
    """Options of ``kedge.GRPOTrainer``, with the defaults of TRL 1.16."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.importance_sampling_level == "sequence" and self.loss_type != "grpo":
            logger.warning(
                "importance_sampling_level='sequence' with loss_type=%r gives long responses more"
                " weight, since the loss sums over tokens; for GSPO set loss_type='grpo'",
                self.loss_type,
            )
