"""Metrics under the names of TRL's GRPO and RLOO trainers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from kedge.engine.metrics import TRL_NAMES

if TYPE_CHECKING:
    from kedge.trainers.run.run import Run

_STD = "/std"


def log_trl_names(run: Run) -> None:
    """Make training and evaluations of ``run`` also log TRL's names."""
    rows = run.engine.batch_sizes.batch_size
    token_kl = run.engine.algorithm.name != "rloo"
    run.more = run.evaluator.more = partial(trl_names, rows=rows, token_kl=token_kl)


def trl_names(row: Mapping[str, float], *, rows: int, token_kl: bool = True) -> dict[str, float]:
    """The metrics of ``row`` under TRL's names.

    Args:
        row: metrics of an iteration, or of an evaluation without its prefix.
        rows: responses of a batch; TRL's standard deviations divide by rows - 1.
        token_kl: ``kl`` is the KL in the loss; False: the KL in the reward, per token.
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
