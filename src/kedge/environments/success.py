"""Success of a policy in environments, from played episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kedge.math.intervals import share_interval
from kedge.records.errors import DataError


def measure_success(
    episodes: Sequence[Mapping[str, Any]], success_score: float = 1.0
) -> dict[str, Any]:
    """Success, score, turns, truncated and failed episodes, and means of the metrics.

    An episode is a success if its metric ``success`` is positive, or, where no episode has such a
    metric, if its score is at least ``success_score``.  Episodes whose environment failed only
    count as failed.

    Args:
        episodes: rows of ``kedge generate --environment``, at least one.
        success_score: see above.

    Raises:
        DataError: the environments of all episodes failed.
    """
    sound = [row for row in episodes if not row["error"]]
    if not sound:
        raise DataError(f"all {len(episodes)} episodes failed: {episodes[0]['error']}")
    names = sorted({name for row in sound for name in row["metrics"]})
    own = "success" in names
    tasks: dict[Any, list[float]] = {}  # several episodes of a seed may have the same outcome
    for number, row in enumerate(sound):
        won = row["metrics"].get("success", 0) > 0 if own else row["score"] >= success_score
        tasks.setdefault(row.get("seed", -number), []).append(float(won))
    low, high = share_interval(list(tasks.values()))
    return {
        "success": fmean(x for task in tasks.values() for x in task),
        "low": low,
        "high": high,
        "criterion": "metric success" if own else f"score of at least {success_score:g}",
        "score": fmean(row["score"] for row in sound),
        "turns": fmean(row["turns"] for row in sound),
        "truncated": fmean(not row["terminated"] for row in sound),
        "failed": len(episodes) - len(sound),
        "metrics": {name: fmean(row["metrics"].get(name, 0) for row in sound) for name in names},
    }


def describe(result: Mapping[str, Any]) -> str:
    """Format the result of ``measure_success`` for ``kedge generate``."""
    spread = f"95%: {result['low']:.1%} to {result['high']:.1%}"
    lines = {
        "success": f"{result['success']:.1%} ({spread}; {result['criterion']})",
        "score": f"{result['score']:.4g}",
        "turns": f"{result['turns']:.3g}",
        "truncated": f"{result['truncated']:.1%}",
        "failed": f"{result['failed']} episodes",
        **{name: f"{x:.4g}" for name, x in result["metrics"].items() if name != "success"},
    }
    return "".join(f"  {name:<12} {text}\n" for name, text in lines.items())
