"""Asynchronous PPO: ``PPOTrainer`` with open-instruct's options, defaults and metric names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kedge.ext.open_instruct.config import AsyncPPOConfig
from kedge.trainers.ppo import PPOTrainer
from kedge.trainers.spec import MetricNames

if TYPE_CHECKING:
    from kedge.loop.loop import Engine

# open-instruct's names of metrics -> Kedge's; training logs both.
OPEN_INSTRUCT_NAMES: dict[str, str] = {
    "val/sequence_lengths": "completions/mean_length",
    "val/sequence_lengths_min": "completions/min_length",
    "val/sequence_lengths_max": "completions/max_length",
    "val/num_stop_token_ids": "val/num_eos_tokens",
    "objective/verifiable_correct_rate": "log/verifiable_correct_rate",
}


def log_open_instruct_names(args: Any, engine: Engine) -> MetricNames:
    """Add open-instruct's names, in training only."""
    rows, begin = engine.batch_sizes.batch_size, 0.0

    def names(row: Mapping[str, float]) -> dict[str, float]:
        nonlocal begin
        if "episode" not in row:  # evaluation rows
            return {}
        begin = begin or time.perf_counter() - row["time/step"]
        metrics = {new: row[old] for new, old in OPEN_INSTRUCT_NAMES.items() if old in row}
        for name, value in row.items():
            if name.startswith("log/") and name.endswith(("_reward", "_correct_rate")):
                metrics[f"objective/{name.removeprefix('log/')}"] = value
            if name.startswith("rewards/") and name.endswith("r1_style_format"):
                metrics["val/format_scores"] = value
        return metrics | {
            "training_step": row["episode"] / rows,
            "objective/loss": row.get("loss/policy_avg", 0.0)
            + args.vf_coef * row.get("loss/value_avg", 0.0),
            "val/stop_token_rate": row["val/num_eos_tokens"] / rows,
            "time/training": row["time/annotate"] + row["time/update"],
            "time/from_scratch": time.perf_counter() - begin,
        }

    return names


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

    SPEC = replace(
        PPOTrainer.SPEC,
        config=AsyncPPOConfig,
        metric_names=log_open_instruct_names,
        equal_vocabulary=True,
        command="kedge.ext.open_instruct.command",
        learners=lambda args: sum(args.actor_num_gpus_per_node or [1]),
    )
