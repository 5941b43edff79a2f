"""The log of a run: ``metrics.jsonl``, one row per logged update."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.errors import DataError

FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RunLog:
    """Rows of training metrics in order, without evaluations.

    Args:
        name: where they came from.
        rows: one mapping per logged update.
        fixed_length: the run asked for no stop token and no stop string, so no response can end.
    """

    name: str
    rows: Sequence[dict[str, float]]
    fixed_length: bool = False

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
    rows = [row for row in read_rows(place) if "objective/scores" in row]
    if not rows:
        raise DataError(f"{log_file(place)} holds no row of training (none with objective/scores)")
    return RunLog(Path(place).name, rows, fixed_length(log_file(place).parent))


_STOPS = ("stop_token", "stop_token_id", "stop_token_ids", "stop_strings")


def fixed_length(folder: Path) -> bool:
    """Whether ``run.json`` says that nothing was meant to end a response; False without it."""
    try:
        options = json.loads((folder / "run.json").read_text(encoding="utf-8"))["options"]
        return all(not options[name] for name in _STOPS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def log_file(place: str | Path) -> Path:
    """The ``metrics.jsonl`` of a run.

    Raises:
        DataError: there is none.
    """
    path = Path(place).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{path} has no {FILE}: give the output_dir of a run, or the file itself")
    return file


def read_rows(place: str | Path) -> list[dict[str, float]]:
    """Every row of the log, evaluations too; what is no number is left out.

    Raises:
        DataError: there is no log, or it is damaged.
    """
    file = log_file(place)
    return [
        {k: float(x) for k, x in row.items() if isinstance(x, int | float)}
        for row in read_objects(file)
    ]


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line.

    Raises:
        DataError: a line is something else.
    """
    found: list[dict[str, Any]] = []
    # Not splitlines: a response may hold characters that it, too, takes for the end of a line.
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}, line {number} is no object: {line[:80]}")
        found.append(row)
    return found
