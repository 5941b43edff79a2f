"""Context of a rank that was started by ``launch``."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from kedge.ext.ray.cluster import HEALTH
from kedge.ext.ray.placement import Placement

_CONTEXT: list[RankContext] = []
INBOX: SimpleQueue[Any] = SimpleQueue()  # references that learner 0 has sent to this process
STOP = threading.Event()  # set in a rank's process once the driver asks it to stop


class DriverMailbox:
    """Mailbox actor: ranks post metrics and warnings to the driver."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._stops = False

    def post(self, row: dict[str, Any]) -> None:
        """Add a row of metrics."""
        self._rows.append(row)

    def note(self, text: str) -> None:
        """Add a warning."""
        self._notes.append(text)

    def stop(self) -> None:
        """Note that the last iteration has ended."""
        self._stops = True

    def take(self) -> tuple[list[dict[str, Any]], list[str], bool, int]:
        """Rows and warnings since the last call, whether the ranks stop, and the process id."""
        rows, notes = self._rows, self._notes
        self._rows, self._notes = [], []
        return rows, notes, self._stops, os.getpid()


@dataclass(slots=True, kw_only=True)
class RankContext:
    """A rank's view of the launch."""

    rank: int
    world_size: int
    placement: Placement  # placement of all actors
    mailbox: Any  # handle of the DriverMailbox actor
    learners: Sequence[Any]  # handles of the actors of all ranks

    def post(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics to the driver."""
        self.mailbox.post.remote(dict(row))

    def note(self, text: str) -> None:
        """Send a warning to the driver."""
        self.mailbox.note.remote(f"learner {self.rank}: {text}")

    def stopping(self) -> bool:
        """Whether the driver asked this rank to stop; called at the end of an iteration."""
        if STOP.is_set():
            self.mailbox.stop.remote()
        return STOP.is_set()

    def send(self, items: list[Any]) -> None:
        """Store an item for each rank from 1 on, and send the references."""
        import ray

        references = [ray.put(item) for item in items]
        for learner, reference in zip(self.learners[1:], references, strict=True):
            # In a list the reference is not resolved: the learner reads it in its main thread.
            learner.call.options(concurrency_group=HEALTH).remote("deliver", [reference])

    def receive(self) -> Any:
        """The next item that learner 0 sent to this rank."""
        import ray

        return ray.get(INBOX.get())


def get_context() -> RankContext | None:
    """The context of this process; None outside a launch."""
    return _CONTEXT[0] if _CONTEXT else None


def set_context(context: RankContext) -> None:
    """Set the context of this process."""
    _CONTEXT[:] = [context]
