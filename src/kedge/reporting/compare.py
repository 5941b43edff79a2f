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
    curves = [
        [(row[axis], row[metric]) for row in run.rows if metric in row and axis in row]
        for run in runs
    ]
    if not all(curves):
        return None
    points = [*zip(*curves, strict=False)]  # as many as the shortest curve has
    columns = [[y for _, y in point] for point in points]
    return Band(
        x=[point[0][0] for point in points],
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
