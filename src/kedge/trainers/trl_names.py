"""The metrics of a row under the names that TRL's GRPO and RLOO trainers log them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from kedge.engine.metrics import TRL_NAMES

if TYPE_CHECKING:
    from kedge.trainers.run.run import Run

_STD = "/std"


def log_trl_names(run: Run) -> None:
    """Let training and evaluations of ``run`` log TRL's names, too."""
    rows = run.engine.batch_sizes.batch_size
    token_kl = run.engine.algorithm.name != "rloo"
    run.more = run.evaluator.more = partial(trl_names, rows=rows, token_kl=token_kl)


def trl_names(row: Mapping[str, float], *, rows: int, token_kl: bool = True) -> dict[str, float]:
    """What TRL calls the metrics of ``row``.

    Args:
        row: metrics of an update, or of an evaluation without its prefix.
        rows: responses of a batch; TRL's deviations divide by their number less one.
        token_kl: ``kl`` is the KL in the loss; False: the KL in the reward, per token.
    """
    found = {theirs: row[ours] for theirs, ours in TRL_NAMES.items() if ours in row}
    for name, value in row.items():
        if name.startswith("rewards/") and not name.endswith(_STD):
            found[f"{name}/mean"] = value
        elif name.startswith("log/"):
            found.setdefault(name.removeprefix("log/"), value)
    scored = rows - row.get("rollout/dropped_rows", 0.0)
    if "reward_std" in found and scored > 1:
        found["reward_std"] *= (scored / (scored - 1)) ** 0.5
    length = row.get("completions/mean_length", 0.0)
    if not token_kl and "objective/kl" in row and length:
        found["kl"] = row["objective/kl"] / length
    return {name: value for name, value in found.items() if name not in row}
