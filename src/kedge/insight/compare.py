"""Runs beside one another: the mean of several seeds and the range between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from kedge.insight.log import RunLog

AXES = ("episode", "step")


@dataclass(frozen=True, slots=True)
class Band:
    """A metric of several runs of one kind, where all of them have it.

    Args:
        x: episodes or updates.
        mean: over the runs.
        low: the smallest of them.
        high: the largest.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def band(runs: Sequence[RunLog], metric: str, axis: str = "episode") -> Band | None:
    """The metric over the runs, at the places of the shortest of them; None if one never has it."""
    curves = []
    for run in runs:
        points = [(row[axis], row[metric]) for row in run.rows if metric in row and axis in row]
        if not points:
            return None
        curves.append(points)
    length = min(map(len, curves))
    columns = [[curve[i][1] for curve in curves] for i in range(length)]
    return Band(
        x=[x for x, _ in curves[0][:length]],
        mean=[fmean(c) for c in columns],
        low=[min(c) for c in columns],
        high=[max(c) for c in columns],
    )


def ends(
    runs: Sequence[RunLog], metric: str, *, at: Literal["start", "end"] = "end"
) -> tuple[float, float, float] | None:
    """Mean, smallest and largest over the runs of each run's last (or first) fifth."""
    means = [run.last(metric) if at == "end" else run.first(metric) for run in runs]
    values = [x for x in means if x is not None]
    return (fmean(values), min(values), max(values)) if values else None
