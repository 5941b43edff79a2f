"""Trackers without dependencies: one for files, one that forwards to several."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from kedge.records.errors import CheckpointError, ConfigError, way_out

if TYPE_CHECKING:  # these import torch, which `kedge report` does not need
    from kedge.records.protocols import Tracker

logger = logging.getLogger(__name__)


def format_duration(seconds: float) -> str:
    """``8.3 s``, ``42 s``, ``1 min 22 s`` or ``1 h 02 min``."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole, minutes = round(seconds), round(seconds / 60)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class JsonlTracker:
    """One JSON object per line: metrics in ``metrics.jsonl``, tables in ``NAME/step-000012.jsonl``.

    Non-finite numbers, which JSON cannot represent, are written as null.  A resumed run has a
    ``history``, rows with their "step".  A file with other rows (of an earlier run, or of
    iterations lost in a kill) is renamed to ``metrics.1.jsonl`` (2, 3, ...); without history, so
    are folders of tables.
    """

    def __init__(self, folder: str | Path, *, history: Sequence[Mapping[str, float]] = ()) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "metrics.jsonl"
        lines = [json_line({"step": row["step"], **row}) for row in history]
        if self.file.exists():
            old = self.file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
            if not {*map(_with_sorted_keys, old)} <= {*map(_with_sorted_keys, lines)}:
                self.file.rename(_unused_name(self.file))
        for tables in {file.parent for file in self.folder.glob("*/step-*.jsonl")}:
            ours = tables.name == "tokens" or tables.name.endswith("completions")
            if not lines and ours:  # a folder of another name is the user's
                tables.rename(_unused_name(tables))
        write_whole(self.file, "".join(lines))
        self._unwritten: list[str] = []  # rows that failed to be written so far

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one row; it is in the file when this returns.

        If the write fails, no part of the row is in the file; the next call writes it first.
        """
        self._unwritten.append(json_line({"step": step, **metrics}))
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a", encoding="utf-8", errors="backslashreplace") as out:
                out.write("".join(self._unwritten))
        except OSError:
            with suppress(OSError):
                os.truncate(self.file, size)
            raise
        self._unwritten.clear()

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Write one table; a table of the same name and step is replaced, if the write succeeds."""
        file = self.folder / name / f"step-{step:06d}.jsonl"
        write_whole(file, "".join(json_line(row) for row in rows))

    def close(self) -> None:
        """Do nothing: no file is held open, so an evaluation after training is recorded too."""


def write_whole(file: Path, text: str) -> None:
    """Write a text file atomically, creating its parent folders.

    Lone surrogates, which UTF-8 cannot encode, are written as escapes, as in JSON.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)  # also a link, which must not be written through
        with part.open("x", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text)
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _unused_name(file: Path) -> Path:
    """An unused name in the same folder."""
    number = 1
    while (aside := file.with_name(f"{file.stem}.{number}{file.suffix}")).exists():
        number += 1
    return aside


def _with_sorted_keys(line: str) -> str:
    """Sort the keys of a row; damaged or truncated lines stay unchanged."""
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except (ValueError, RecursionError):
        return line


def json_line(row: Mapping[str, object]) -> str:
    """Encode a row as one line of JSON; non-finite numbers become null."""
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    return json.dumps(clean, ensure_ascii=False, default=str) + "\n"


class BestEffortWriter:
    """Logs failed writes once for each kind of file, instead of raising.

    Only failed writes of checkpoints and models end a run.
    """

    def __init__(self) -> None:
        self._reported: set[str] = set()

    @contextmanager
    def writing(self, what: str, where: str | Path) -> Iterator[None]:
        """Context in which a failure to write a kind of file, ``what``, is only logged.

        Whatever it raises: a picture, a table or a tracker must not cost the weights.
        """
        try:
            yield
        except Exception as error:
            cause = (isinstance(error, CheckpointError) and error.__cause__) or error
            if what not in self._reported:
                self._reported.add(what)
                written = isinstance(cause, OSError | SafetensorError)
                logger.warning(
                    "cannot write %s to %s (%s); training continues without it%s",
                    *(what, where, cause if written else f"{type(cause).__name__}: {cause}"),
                    f". Fix: {way_out(cause)}" if written else "",
                )


class CompositeTracker:
    """Forwards everything to several trackers, in order; failed writes are only logged."""

    def __init__(
        self, trackers: Sequence[Tracker] = (), writer: BestEffortWriter | None = None
    ) -> None:
        self.trackers, self._writer = list(trackers), writer or BestEffortWriter()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one row of metrics everywhere."""
        self._each("metrics", lambda tracker: tracker.log(metrics, step=step))

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Record a table everywhere."""
        self._each(f"the table {name}", lambda tracker: tracker.table(name, rows, step=step))

    def close(self) -> None:
        """Close all."""
        self._each("metrics", lambda tracker: tracker.close())

    def _each(self, what: str, call: Callable[[Tracker], None]) -> None:
        for tracker in self.trackers:
            with self._writer.writing(what, getattr(tracker, "folder", type(tracker).__name__)):
                call(tracker)


@contextmanager
def required_write(option: str, folder: str | Path) -> Iterator[None]:
    """Context for the first files of a run, in which a failed write raises."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{option}={str(folder)!r} must be writable ({error}); nothing was trained yet:"
            f" {way_out(error)}, or set another folder"
        ) from error
