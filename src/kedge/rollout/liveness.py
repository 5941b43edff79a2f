"""Processes that do not respond: hung, or only busy.

A busy process may be silent for long, for instance while compiled code holds Python's global lock,
so a process counts as lost only after the user's ``worker_timeout``.

A batch system may suspend all processes of a job for hours (``scontrol suspend``).
Silence therefore counts only while the process that waits is running itself (``RunningTime``).
Timeouts of gloo, of NCCL between learners and of HTTP count elapsed time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)
WARN_AFTER = 8.0  # seconds of silence until a warning


class RunningTime:
    """A clock that stands still while this process is stopped.

    It must be read more often than every ``GAP`` seconds: a longer time between two readings does
    not count.
    """

    GAP = 2.0

    def __init__(self) -> None:
        self._last, self._seconds = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Since the clock was created."""
        now = time.monotonic()
        if now - self._last <= self.GAP:
            self._seconds += now - self._last
        self._last = now
        return self._seconds


def silence(name: str, patience: float) -> str:
    """The warning about a process that does not respond but may be busy."""
    return (
        f"{name} has not responded for {WARN_AFTER:g} s; it may be busy, and counts as hung after"
        f" {patience:g} s without a response (worker_timeout)"
    )


@contextlib.contextmanager
def reporting_silence(name: str, patience: float) -> Iterator[None]:
    """Context that reports if waiting for a response takes long."""
    timer = threading.Timer(WARN_AFTER, logger.warning, ["%s", silence(name, patience)])
    timer.daemon = True
    if patience > WARN_AFTER:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
