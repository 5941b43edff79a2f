"""Asynchronous PPO: ``PPOTrainer`` with open-instruct's options, defaults and metric names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kedge.config.async_ppo import AsyncPPOConfig
from kedge.errors import ConfigError
from kedge.trainers.ppo import PPOTrainer

_OPEN_INSTRUCT_NAMES = {
    "val/sequence_lengths": "completions/mean_length",
    "val/sequence_lengths_min": "completions/min_length",
    "val/sequence_lengths_max": "completions/max_length",
    "val/num_stop_token_ids": "val/num_eos_tokens",
    "objective/verifiable_correct_rate": "log/verifiable_correct_rate",
}


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

    def __init__(
        self, args: AsyncPPOConfig | None = None, *positional: Any, **keywords: Any
    ) -> None:
        args = AsyncPPOConfig() if args is None else args
        if not isinstance(args, AsyncPPOConfig):
            raise ConfigError(
                f"args must be a kedge.AsyncPPOConfig, got a {type(args).__name__}; pass it as the"
                " first argument"
            )
        super().__init__(args, *positional, **keywords)
        self._begin = time.perf_counter()
        self._run.more = self._other_names

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Train to the end; ``resume_from_checkpoint`` is True (newest checkpoint) or a folder."""
        self._begin = time.perf_counter()
        return super().train(resume_from_checkpoint)

    def _other_names(self, row: Mapping[str, float]) -> dict[str, float]:
        """The metrics of an iteration under open-instruct's names."""
        sizes = self.engine.batch_sizes
        config = self.args
        assert isinstance(config, AsyncPPOConfig)
        metrics = {new: row[old] for new, old in _OPEN_INSTRUCT_NAMES.items() if old in row}
        metrics |= {
            f"objective/{name.removeprefix('log/')}": value
            for name, value in row.items()
            if name.startswith("log/") and name.endswith(("_reward", "_correct_rate"))
        }
        for name, value in row.items():
            if name.startswith("rewards/") and name.endswith("r1_style_format"):
                metrics["val/format_scores"] = value
        loss = row.get("loss/policy_avg", 0.0) + config.vf_coef * row.get("loss/value_avg", 0.0)
        return metrics | {
            "training_step": row["episode"] / sizes.batch_size,
            "objective/loss": loss,
            "val/stop_token_rate": row["val/num_eos_tokens"] / sizes.batch_size,
            "time/training": row["time/annotate"] + row["time/update"],
            "time/from_scratch": time.perf_counter() - self._begin,
        }
