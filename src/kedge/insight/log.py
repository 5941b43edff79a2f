"""The log of a run: ``metrics.jsonl``, one row per logged update."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.errors import DataError

FILE = "metrics.jsonl"
_LARGEST = sys.float_info.max
logger = logging.getLogger(__name__)


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

    Lines that cannot be read are left out, with a warning that counts them.

    Raises:
        DataError: there is none, or it holds no training.
    """
    skipped = Skipped()
    rows = [row for row in read_rows(place, skipped) if "objective/scores" in row]
    skipped.warn()
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


def read_rows(place: str | Path, skipped: Skipped) -> list[dict[str, float]]:
    """Every row of the log, evaluations too; values that are not finite numbers are left out.

    Raises:
        DataError: there is no log, or it cannot be opened.
    """
    rows = read_table(log_file(place), skipped)
    return [
        {k: float(x) for k, x in row.items() if isinstance(x, int | float) and abs(x) <= _LARGEST}
        for row in rows
    ]


class Skipped:
    """Counts what could not be read in the files of a run, to say so once."""

    def __init__(self) -> None:
        self._lines: dict[Path, int] = {}

    def add(self, file: Path, lines: int = 1) -> None:
        """So many lines of a file were skipped."""
        if lines:
            self._lines[file] = self._lines.get(file, 0) + lines

    def warn(self) -> None:
        """Log one warning if anything was skipped."""
        if self._lines:
            files = [f"{file.parent.name}/{file.name} ({n})" for file, n in self._lines.items()]
            more = f" and {len(files) - 5} more files" if len(files) > 5 else ""
            logger.warning(
                "skipped %d damaged lines: %s%s",
                sum(self._lines.values()),
                ", ".join(files[:5]),
                more,
            )


def read_table(file: Path, skipped: Skipped) -> list[dict[str, Any]]:
    """The JSON objects of a run's file, one a line, as far as they can be read.

    Numbers that are not finite become None, as Kedge writes them.

    Raises:
        DataError: the file cannot be opened.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    found = [row for line in lines if (row := _row(line)) is not None]
    skipped.add(file, sum(1 for line in lines if line.strip()) - len(found))
    return found


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode(), parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of data, one a line, every one of which is needed.

    Raises:
        DataError: a line is something else.
    """
    found: list[dict[str, Any]] = []
    # Not splitlines: a response may hold characters that it, too, takes for the end of a line.
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
        found.append(row)
    return found
