"""Where this process sits, if it is a rank that ``launch`` started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.backends.ray.placement import Placement

_CONTEXT: list[RankContext] = []


class DriverMailbox:
    """An actor that takes news to the driver and its wish to stop to the ranks."""

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

    def take(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The rows and the warnings since the last call."""
        found = self._rows, self._notes
        self._rows, self._notes = [], []
        return found

    def stop(self) -> None:
        """Ask the ranks to write a checkpoint and end."""
        self._stop = True

    def stopping(self) -> bool:
        """Whether they shall."""
        return self._stop


@dataclass(slots=True, kw_only=True)
class RankContext:
    """What a rank knows of its launch."""

    rank: int
    world_size: int
    placement: Placement  # of everyone
    mailbox: Any  # handle of the actor
    _asked: Any = field(default=None, init=False)

    def post(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics to the driver."""
        self.mailbox.post.remote(dict(row))

    def note(self, text: str) -> None:
        """Send a warning to the driver."""
        self.mailbox.note.remote(f"learner {self.rank}: {text}")

    def stopping(self) -> bool:
        """Whether the driver wished to stop, as far as the answer is there; never waits."""
        import ray

        if self._asked is None:
            self._asked = self.mailbox.stopping.remote()
        done, _ = ray.wait([self._asked], timeout=0)
        if not done:
            return False
        asked, self._asked = self._asked, None
        return bool(ray.get(asked))


def get_context() -> RankContext | None:
    """The place of this process in a launch; None outside one."""
    return _CONTEXT[0] if _CONTEXT else None


def set_context(place: RankContext) -> None:
    """This process is that rank from now on."""
    _CONTEXT[:] = [place]
