"""Reads the logs of runs, ``metrics.jsonl`` with one row per iteration, and compares them."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kedge.errors import DataError

FILE = "metrics.jsonl"
AXES = {"episode": "responses trained on", "step": "iterations"}
_LARGEST = sys.float_info.max
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunLog:
    """Rows of training metrics in order, without evaluations."""

    name: str  # of the run's folder or file
    rows: Sequence[dict[str, float]]
    fixed_length: bool = False  # there is no stop token or stop string
    bf16: bool = False
    masked: bool = False  # tokens outside of the bounds leave the loss (``policy_loss="mask"``)

    def series(self, metric: str) -> list[float]:
        """The finite values of a metric, in order; empty if it was never logged."""
        values = [row[metric] for row in self.rows if metric in row]
        return [x for x in values if math.isfinite(x)]

    def first(self, metric: str, share: float = 0.2) -> float:
        """Mean over the first ``share`` of the run, at least one row; NaN without the metric."""
        values = self.series(metric)
        return fmean(values[: max(1, round(len(values) * share))]) if values else math.nan

    def last(self, metric: str, share: float = 0.2) -> float:
        """Mean over the last ``share`` of the run, at least one row; NaN without the metric."""
        values = self.series(metric)
        return fmean(values[-max(1, round(len(values) * share)) :]) if values else math.nan


def read_log(run: str | Path) -> RunLog:
    """Read the log in a run's ``output_dir``, or a ``metrics.jsonl`` file.

    Damaged lines are skipped, with a warning that counts them.
    """
    rows = [row for row in read_rows(run) if "objective/scores" in row]
    if not rows:
        raise DataError(f"{log_file(run)} has no training rows (none with objective/scores)")
    return RunLog(Path(run).name, rows, **read_options(log_file(run).parent))


_STOPS = ("stop_token", "stop_token_id", "stop_token_ids", "stop_strings")


def read_options(folder: Path) -> dict[str, bool]:
    """``fixed_length``, ``bf16`` and ``masked`` of a ``RunLog``; {} without ``run.json``."""
    try:
        options = json.loads((folder / "run.json").read_text(encoding="utf-8"))["options"]
        fixed = all(not options[name] for name in _STOPS)
        masked = options.get("policy_loss") == "mask"
        return {"fixed_length": fixed, "bf16": bool(options.get("bf16")), "masked": masked}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def log_file(run: str | Path) -> Path:
    """The ``metrics.jsonl`` of a run."""
    path = Path(run).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{path} has no {FILE}: pass the output_dir of a run, or the file itself")
    return file


def read_rows(run: str | Path) -> list[dict[str, float]]:
    """All rows of the log, including evaluations, with their finite numbers."""
    rows = read_table(log_file(run))
    return [
        {k: float(x) for k, x in row.items() if isinstance(x, int | float) and abs(x) <= _LARGEST}
        for row in rows
    ]


def read_table(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a run's file, one per line; a warning counts lines that are damaged.

    Non-finite numbers become None, as Kedge writes them.
    """
    try:
        lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    rows = [row for line in lines if (row := _parse_row(line)) is not None]
    if len(rows) < len(lines):
        count, name = len(lines) - len(rows), f"{file.parent.name}/{file.name}"
        logger.warning("skipped %d damaged lines of %s", count, name)
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    def finite(text: str) -> float | None:
        return x if math.isfinite(x := float(text)) else None

    try:
        row = json.loads(line.decode(), parse_constant=lambda _: None, parse_float=finite)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a data file, one per line; every line must be valid."""
    objects: list[dict[str, Any]] = []
    # Not splitlines, which also splits at other separators that responses may contain.
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}, line {number} is not JSON in UTF-8: {error}") from error
        if not isinstance(row, dict):
            shown = line[:80].decode(errors="replace")
            raise DataError(f"{file}, line {number} is not a JSON object: {shown}")
        objects.append(row)
    return objects


def score_change(log: RunLog) -> tuple[float, float, float]:
    """Mean score over the first and last fifth of a run, and the standard error of such a mean.

    The error is NaN without the scores' deviation and the number of responses.
    """
    responses = responses_per_batch(log) * max(1, round(len(log.rows) * 0.2))
    noise = (log.first("objective/scores_std") or math.nan) / responses**0.5
    return log.first("objective/scores"), log.last("objective/scores"), noise


def responses_per_batch(log: RunLog) -> float:
    """Responses per iteration; NaN if they were not logged."""
    episodes = log.series("episode")
    if len(episodes) == 1:
        return episodes[0] or math.nan
    return min((b - a for a, b in pairwise(episodes) if b > a), default=math.nan)


@dataclass(frozen=True, slots=True)
class Band:
    """A metric over several runs, at their common points."""

    x: list[float]  # episodes or iterations
    mean: list[float]
    low: list[float]
    high: list[float]


def band(runs: Sequence[RunLog], metric: str, axis: str = "episode") -> Band | None:
    """The metric over the runs, at the x values of the first; None if a run lacks it."""
    curves = [
        [(row[axis], row[metric]) for row in run.rows if metric in row and axis in row]
        for run in runs
    ]
    if not all(curves):
        return None
    points = [*zip(*curves, strict=False)]  # cut to the shortest curve
    columns = [[y for _, y in point] for point in points]
    return Band(
        x=[point[0][0] for point in points],
        mean=[fmean(c) for c in columns],
        low=[min(c) for c in columns],
        high=[max(c) for c in columns],
    )


def end_stats(
    runs: Sequence[RunLog], metric: str, *, at: Literal["start", "end"] = "end"
) -> tuple[float, float, float] | None:
    """Mean, minimum and maximum over runs; each run counts with the mean of a fifth."""
    means = [run.last(metric) if at == "end" else run.first(metric) for run in runs]
    values = [x for x in means if not math.isnan(x)]
    return (fmean(values), min(values), max(values)) if values else None
