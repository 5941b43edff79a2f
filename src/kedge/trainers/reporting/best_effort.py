"""Files beside a run: one that cannot be written is told of once, and the run goes on.

Only checkpoints and models are worth ending a run for.
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
    """Lets writes fail, and says so: once for each kind of file."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    @contextmanager
    def writing(self, what: str, where: str | Path) -> Iterator[None]:
        """Inside, a disk that refuses is no error.

        Args:
            what: the kind of file, as the warning names it.
            where: the file or folder.
        """
        try:
            yield
        except (OSError, CheckpointError) as error:
            cause = error.__cause__ if isinstance(error, CheckpointError) else error
            if not isinstance(cause, OSError | SafetensorError):
                raise  # not the disk
            if what not in self._told:
                self._told.add(what)
                logger.warning(
                    "%s cannot be written to %s (%s); training goes on without: %s",
                    what,
                    where,
                    cause,
                    way_out(cause),
                )


class BestEffortTracker:
    """A tracker whose failures to write end nothing.

    Args:
        tracker: what writes.
        beside: tells of failures.
        where: for the warning.
    """

    def __init__(self, tracker: Tracker, beside: BestEffortWriter, where: str | Path) -> None:
        self._tracker, self._beside, self._where = tracker, beside, where

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one row of metrics."""
        with self._beside.writing("metrics", self._where):
            self._tracker.log(metrics, step=step)

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Record a table."""
        with self._beside.writing(f"the table {name}", self._where):
            self._tracker.table(name, rows, step=step)

    def close(self) -> None:
        """Flush and release."""
        with self._beside.writing("metrics", self._where):
            self._tracker.close()


@contextmanager
def required_write(option: str, folder: str | Path) -> Iterator[None]:
    """Inside, files of a run that begins are made: a disk that refuses is an error.

    Raises:
        ConfigError: names the option, the folder and the cause.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{option}={str(folder)!r} cannot be written to ({error}); nothing was trained yet:"
            f" {way_out(error)}, or name another folder"
        ) from error
