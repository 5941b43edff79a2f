"""Ctrl-C and SIGTERM as a wish that a run grants in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class GracefulShutdown:
    """Signals to stop: the first is granted in good order, the second of its kind at once.

    A launcher may add its own SIGTERM to the Ctrl-C that all its processes got; that is one wish.
    """

    def __init__(self) -> None:
        self._number = 0
        self._told = False

    @contextmanager
    def install(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM wait to be asked for."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are somebody else's
            return
        before = {n: signal.signal(n, self._hear) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: Any) -> None:
        if self._number == number:
            self._raise()
        self._number = self._number or number

    @property
    def requested(self) -> bool:
        """Whether there is one."""
        return bool(self._number)

    def newly_requested(self) -> bool:
        """Whether there is one that was not told of before."""
        told, self._told = self._told, self.requested
        return self._told and not told

    def reraise(self) -> None:
        """What the signal would have done."""
        if self._number:
            self._raise()

    def _raise(self) -> None:
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self._number)
