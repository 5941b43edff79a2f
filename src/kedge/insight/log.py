"""The log of a run: ``metrics.jsonl``, one row per logged update."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kedge.errors import DataError

FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RunLog:
    """Rows of training metrics in order, without evaluations.

    Args:
        name: where they came from.
        rows: one mapping per logged update.
    """

    name: str
    rows: Sequence[dict[str, float]]

    def series(self, metric: str) -> list[float]:
        """The finite values of a metric, in order; empty if it was never logged."""
        found = [row[metric] for row in self.rows if metric in row]
        return [x for x in found if math.isfinite(x)]

    def first(self, metric: str, share: float = 0.2) -> float | None:
        """Mean over the first ``share`` of the run, at least one row; None without the metric."""
        values = self.series(metric)
        return fmean(values[: max(1, round(len(values) * share))]) if values else None

    def last(self, metric: str, share: float = 0.2) -> float | None:
        """Mean over the last ``share`` of the run, at least one row; None without the metric."""
        values = self.series(metric)
        return fmean(values[-max(1, round(len(values) * share)) :]) if values else None


def read_log(place: str | Path) -> RunLog:
    """Read the log of a run's ``output_dir``, or a ``metrics.jsonl`` itself.

    Raises:
        DataError: there is none, it is damaged, or it holds no training.
    """
    path = Path(place).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{path} has no {FILE}: give the output_dir of a run, or the file itself")
    rows: list[dict[str, float]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}, line {number} is no row of metrics: {line[:80]}")
        if "objective/scores" in row:
            rows.append({k: float(x) for k, x in row.items() if isinstance(x, int | float)})
    if not rows:
        raise DataError(f"{file} holds no row of training (none with objective/scores)")
    return RunLog(path.name, rows)
