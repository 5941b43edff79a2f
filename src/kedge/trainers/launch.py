"""What a launcher of ranks offers them beyond accelerate's process groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class LaunchContext(Protocol):
    """A rank's view of the launch."""

    rank: int
    world_size: int

    def post(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics to the driver."""

    def note(self, text: str) -> None:
        """Send a warning to the driver."""

    def stopping(self) -> bool:
        """Whether the driver asked this rank to stop; called at the end of an iteration."""

    def send(self, items: list[Any]) -> None:
        """Send an item to each rank from 1 on."""

    def receive(self) -> Any:
        """The next item that rank 0 sent to this rank."""


_current: list[LaunchContext] = []


def launch_context() -> LaunchContext | None:
    """The context of this process; None outside a launch."""
    return _current[0] if _current else None


def set_launch_context(context: LaunchContext) -> None:
    """Set the context of this process."""
    _current[:] = [context]
