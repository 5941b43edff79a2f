"""Metrics under the names of TRL's GRPO and RLOO trainers and of open-instruct."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from kedge.loop.loop import Engine
from kedge.loop.metrics import TRL_NAMES
from kedge.trainers.spec import MetricNames

_STD = "/std"
_OPEN_INSTRUCT_NAMES = {
    "val/sequence_lengths": "completions/mean_length",
    "val/sequence_lengths_min": "completions/min_length",
    "val/sequence_lengths_max": "completions/max_length",
    "val/num_stop_token_ids": "val/num_eos_tokens",
    "objective/verifiable_correct_rate": "log/verifiable_correct_rate",
}


def log_trl_names(args: Any, engine: Engine) -> MetricNames:
    """Add TRL's names, in training and evaluation."""
    token_kl = engine.algorithm.name != "rloo"
    return partial(trl_names, rows=engine.batch_sizes.batch_size, token_kl=token_kl)


def trl_names(row: Mapping[str, float], *, rows: int, token_kl: bool = True) -> dict[str, float]:
    """The metrics of ``row`` under TRL's names.

    Args:
        row: metrics of an iteration, or of an evaluation without its prefix.
        rows: responses of a batch; TRL's standard deviations divide by rows - 1.
        token_kl: whether ``kl`` is the KL in the loss; False: the KL in the reward, per token.
    """
    metrics = {theirs: row[ours] for theirs, ours in TRL_NAMES.items() if ours in row}
    for name, value in row.items():
        if name.startswith("rewards/") and not name.endswith(_STD):
            metrics[f"{name}/mean"] = value
        elif name.startswith("log/"):
            metrics.setdefault(name.removeprefix("log/"), value)
    scored = rows - row.get("rollout/dropped_rows", 0.0)
    if "reward_std" in metrics and scored > 1:
        metrics["reward_std"] *= (scored / (scored - 1)) ** 0.5
    length = row.get("completions/mean_length", 0.0)
    if not token_kl and "objective/kl" in row and length:
        metrics["kl"] = row["objective/kl"] / length
    return {name: value for name, value in metrics.items() if name not in row}


def log_open_instruct_names(args: Any, engine: Engine) -> MetricNames:
    """Add open-instruct's names, in training only."""
    rows, begin = engine.batch_sizes.batch_size, 0.0

    def names(row: Mapping[str, float]) -> dict[str, float]:
        nonlocal begin
        if "episode" not in row:  # evaluation rows
            return {}
        begin = begin or time.perf_counter() - row["time/step"]
        metrics = {new: row[old] for new, old in _OPEN_INSTRUCT_NAMES.items() if old in row}
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
