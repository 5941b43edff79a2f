"""Compares runs: mean and range of a metric over several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from kedge.reporting.log import RunLog

AXES = ("episode", "step")


@dataclass(frozen=True, slots=True)
class Band:
    """A metric over several runs, at the points that all of them have."""

    x: list[float]  # episodes or iterations
    mean: list[float]
    low: list[float]
    high: list[float]


def band(runs: Sequence[RunLog], metric: str, axis: str = "episode") -> Band | None:
    """The metric over the runs, on the x values of the first; None if a run never logged it."""
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
    """Mean, minimum and maximum over the runs of the mean of each run's last (or first) fifth."""
    means = [run.last(metric) if at == "end" else run.first(metric) for run in runs]
    values = [x for x in means if x is not None]
    return (fmean(values), min(values), max(values)) if values else None
