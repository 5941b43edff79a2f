"""Trackers that need nothing: into memory, into files, into several at once."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kedge.protocols import Tracker


class Memory:
    """Keeps everything; for tests and notebooks."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []  # each with its "step"
        self.tables: list[tuple[str, int, list[dict[str, object]]]] = []  # name, step, rows
        self.closed = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one row of metrics."""
        self.rows.append({"step": step, **metrics})

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Record a table."""
        self.tables.append((name, step, [dict(row) for row in rows]))

    def close(self) -> None:
        """Note that training is over."""
        self.closed = True


class Many:
    """Passes everything on to several trackers, in order.

    Args:
        trackers: where to; none at all on the ranks that report nothing.
    """

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self.trackers = list(trackers)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one row of metrics everywhere."""
        for tracker in self.trackers:
            tracker.log(metrics, step=step)

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Record a table everywhere."""
        for tracker in self.trackers:
            tracker.table(name, rows, step=step)

    def close(self) -> None:
        """Close all."""
        for tracker in self.trackers:
            tracker.close()


class Jsonl:
    """One JSON object per line: metrics in ``metrics.jsonl``, tables in ``NAME/step-000012.jsonl``.

    A number that is not finite is written as null, for JSON has no name for it.

    Args:
        folder: the run's output folder.
        history: the rows of this run so far, each with its "step", when it goes on.  A file with
            other rows belongs to an earlier run, or to updates that a kill undid; it is kept as
            ``metrics.1.jsonl`` (2, 3, ...).  Without history, so are folders of tables.
    """

    def __init__(self, folder: str | Path, *, history: Sequence[Mapping[str, float]] = ()) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "metrics.jsonl"
        lines = [json_line({"step": row["step"], **row}) for row in history]
        if self.file.exists():
            _set_aside(self.file, unless=lines)
        for tables in {file.parent for file in self.folder.glob("*/step-*.jsonl")}:
            if not lines and not tables.suffix:
                tables.rename(_free(tables))
        write_whole(self.file, "".join(lines))
        self._late: list[str] = []  # rows that the disk refused so far

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one row; it is in the file when this returns.

        Raises:
            OSError: the disk refused.  No part of the row is in the file, and the next call writes
                it before its own.
        """
        self._late.append(json_line({"step": step, **metrics}))
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a", encoding="utf-8", errors="backslashreplace") as out:
                out.write("".join(self._late))
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.file, size)
            raise
        self._late.clear()

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Write one table; a table of the same name and step is replaced.

        Raises:
            OSError: the disk refused; a table of before is whole.
        """
        file = self.folder / name / f"step-{step:06d}.jsonl"
        write_whole(file, "".join(json_line(row) for row in rows))

    def close(self) -> None:
        """Nothing is held open, so an evaluation after training is recorded too."""


def write_whole(file: Path, text: str) -> None:
    """Write a text file whole or not at all, with the folders above it.

    Half a surrogate pair, which UTF-8 cannot hold, is written as its escape, as in JSON.

    Raises:
        OSError: the disk refused; what was there before is as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _set_aside(file: Path, *, unless: list[str]) -> None:
    """Rename a file, unless all its rows are among these."""
    lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    if {*map(_sorted, lines)} <= {*map(_sorted, unless)}:
        return
    file.rename(_free(file))


def _free(file: Path) -> Path:
    """A name beside it that is free."""
    number = 1
    while (aside := file.with_name(f"{file.stem}.{number}{file.suffix}")).exists():
        number += 1
    return aside


def _sorted(line: str) -> str:
    """A row with its keys in order; a line that is damaged or cut short as it is."""
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except (ValueError, RecursionError):
        return line


def json_line(row: Mapping[str, object]) -> str:
    """A row as one line of JSON; a number that is not finite is null."""
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    return json.dumps(clean, ensure_ascii=False, default=str) + "\n"
