"""Asynchronous PPO: ``PPOTrainer`` with open-instruct's options, defaults and metric names."""

from __future__ import annotations

from dataclasses import replace

from kedge.ext.open_instruct.config import AsyncPPOConfig
from kedge.trainers.ppo import PPOTrainer
from kedge.trainers.spec import log_open_instruct_names


class AsyncPPOTrainer(PPOTrainer):
    """Trains with PPO while the rollout engines sample the next batches.

    The same loop and numbers as ``PPOTrainer``, with the options of ``AsyncPPOConfig``; metrics are
    also logged under open-instruct's names.

    Args:
        args: every option; see ``AsyncPPOConfig``.
        positional, keywords: as for ``PPOTrainer``.

    Raises:
        ConfigError, DataError: as ``PPOTrainer``.
    """

    SPEC = replace(PPOTrainer.SPEC, config=AsyncPPOConfig, metric_names=log_open_instruct_names)
