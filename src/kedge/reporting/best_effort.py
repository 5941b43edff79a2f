"""Best-effort writes for logs and tables: a failure is logged once and training continues.

Only failed writes of checkpoints and models end a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from kedge.errors import CheckpointError, ConfigError, way_out
from kedge.protocols import Tracker

logger = logging.getLogger(__name__)


class BestEffortWriter:
    """Logs failed writes once for each kind of file, instead of raising."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    @contextmanager
    def writing(self, what: str, where: str | Path) -> Iterator[None]:
        """Context in which a failed write is only logged.

        Args:
            what: the kind of file, for the warning.
            where: the file or folder.
        """
        try:
            yield
        except (OSError, CheckpointError) as error:
            cause = error.__cause__ if isinstance(error, CheckpointError) else error
            if not isinstance(cause, OSError | SafetensorError):
                raise  # not a failed write
            if what not in self._reported:
                self._reported.add(what)
                logger.warning(
                    "cannot write %s to %s (%s); training continues without it. Fix: %s",
                    what,
                    where,
                    cause,
                    way_out(cause),
                )


class BestEffortTracker:
    """Wraps a tracker so that failed writes are only logged.

    Args:
        tracker: the tracker.
        best_effort: logs failures.
        where: file or folder, for the warning.
    """

    def __init__(self, tracker: Tracker, best_effort: BestEffortWriter, where: str | Path) -> None:
        self._tracker, self._best_effort, self._where = tracker, best_effort, where

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one row of metrics."""
        with self._best_effort.writing("metrics", self._where):
            self._tracker.log(metrics, step=step)

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Record a table."""
        with self._best_effort.writing(f"the table {name}", self._where):
            self._tracker.table(name, rows, step=step)

    def close(self) -> None:
        """Flush and release."""
        with self._best_effort.writing("metrics", self._where):
            self._tracker.close()


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
