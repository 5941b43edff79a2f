"""Best-effort writes for logs and tables: a failure is logged once and training continues.

Only failed writes of checkpoints and models end a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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
                    *(what, where, cause, way_out(cause)),
                )


class CompositeTracker:
    """Forwards everything to several trackers, in order; failed writes are only logged.

    Args:
        trackers: the trackers; empty on ranks that do not report.
        writer: logs failures.
    """

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
