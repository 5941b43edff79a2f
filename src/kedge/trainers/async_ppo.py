"""Asynchronous PPO: ``PPOTrainer`` with open-instruct's options, defaults and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kedge.config.async_ppo import AsyncPPOConfig
from kedge.errors import ConfigError
from kedge.trainers.ppo import PPOTrainer

_SAME = {
    "val/sequence_lengths": "completions/mean_length",
    "val/sequence_lengths_min": "completions/min_length",
    "val/sequence_lengths_max": "completions/max_length",
    "val/num_stop_token_ids": "val/num_eos_tokens",
    "objective/verifiable_correct_rate": "log/verifiable_correct_rate",
}


class AsyncPPOTrainer(PPOTrainer):
    """Trains with PPO while its engines sample the responses to come.

    It is ``PPOTrainer`` -- the same loop, the same numbers -- with the options of
    ``AsyncPPOConfig`` and, beside the usual metrics, the names of open-instruct's page.

    Args:
        args: every option; see ``AsyncPPOConfig``.
        given, named: as for ``PPOTrainer``.

    Raises:
        ConfigError, DataError: as ``PPOTrainer``.
    """

    def __init__(self, args: AsyncPPOConfig | None = None, *given: Any, **named: Any) -> None:
        args = AsyncPPOConfig() if args is None else args
        if not isinstance(args, AsyncPPOConfig):
            raise ConfigError(
                f"args is a {type(args).__name__}; kedge.AsyncPPOTrainer takes a"
                " kedge.AsyncPPOConfig first"
            )
        super().__init__(args, *given, **named)
        self._begin = time.perf_counter()
        self._run.more = self._other_names

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Train to the end; ``resume_from_checkpoint`` is True (the newest) or a folder."""
        self._begin = time.perf_counter()
        return super().train(resume_from_checkpoint)

    def _other_names(self, row: Mapping[str, float]) -> dict[str, float]:
        """What open-instruct calls the metrics of an update."""
        plan = self.engine.batch_sizes
        config = self.args
        assert isinstance(config, AsyncPPOConfig)
        found = {new: row[old] for new, old in _SAME.items() if old in row}
        found |= {
            f"objective/{name.removeprefix('log/')}": value
            for name, value in row.items()
            if name.startswith("log/") and name.endswith(("_reward", "_correct_rate"))
        }
        for name, value in row.items():
            if name.startswith("rewards/") and name.endswith("r1_style_format"):
                found["val/format_scores"] = value
        loss = row.get("loss/policy_avg", 0.0) + config.vf_coef * row.get("loss/value_avg", 0.0)
        return found | {
            "training_step": row["episode"] / plan.batch_size,
            "objective/loss": loss,
            "val/stop_token_rate": row["val/num_eos_tokens"] / plan.batch_size,
            "time/training": row["time/annotate"] + row["time/update"],
            "time/from_scratch": time.perf_counter() - self._begin,
        }
