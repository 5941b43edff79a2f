"""Context of a rank that was started by ``launch``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.backends.ray.placement import Placement

_CONTEXT: list[RankContext] = []


class DriverMailbox:
    """Mailbox actor: ranks post metrics to the driver; the driver signals stop."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._stop = False

    def post(self, row: dict[str, Any]) -> None:
        """Add a row of metrics."""
        self._rows.append(row)

    def note(self, text: str) -> None:
        """Add a warning."""
        self._notes.append(text)

    def take(self) -> tuple[list[dict[str, Any]], list[str], int]:
        """Rows and warnings since the last call, and the process id."""
        rows, notes = self._rows, self._notes
        self._rows, self._notes = [], []
        return rows, notes, os.getpid()

    def stop(self) -> None:
        """Ask the ranks to write a checkpoint and exit."""
        self._stop = True

    def stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stop


@dataclass(slots=True, kw_only=True)
class RankContext:
    """A rank's view of the launch."""

    rank: int
    world_size: int
    placement: Placement  # of all actors
    mailbox: Any  # handle of the DriverMailbox actor
    first: Any = None  # handle of the RankWorker of rank 0
    _stop_query: Any = field(default=None, init=False)

    def post(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics to the driver."""
        self.mailbox.post.remote(dict(row))

    def note(self, text: str) -> None:
        """Send a warning to the driver."""
        self.mailbox.note.remote(f"learner {self.rank}: {text}")

    def stopping(self) -> bool:
        """Whether the driver asked to stop, as far as is known; never blocks."""
        import ray

        if self._stop_query is None:
            self._stop_query = self.mailbox.stopping.remote()
        done, _ = ray.wait([self._stop_query], timeout=0)
        if not done:
            return False
        query, self._stop_query = self._stop_query, None
        try:
            return bool(ray.get(query))
        except ray.exceptions.RayError:  # the mailbox died; Ray restarts it
            return False


def get_context() -> RankContext | None:
    """The context of this process; None outside a launch."""
    return _CONTEXT[0] if _CONTEXT else None


def set_context(context: RankContext) -> None:
    """Set the context of this process."""
    _CONTEXT[:] = [context]
