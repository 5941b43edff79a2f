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
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kedge.config.rollout_engines import RolloutArguments

logger = logging.getLogger(__name__)
WARN_AFTER = 8.0  # seconds of silence until a warning
START_EVERY = 10.0  # seconds between lines about a start


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Timeouts of a server or an actor, in seconds."""

    start: float = 600.0  # until it responds, and until it has built or loaded a model
    heartbeat: float = 5.0  # between health checks
    patience: float = 60.0  # without a response until it counts as hung
    call: float = 3600.0  # maximum of a call of an actor, even if health checks succeed

    @classmethod
    def of(cls, args: RolloutArguments) -> WorkerLimits:
        """The limits in a config."""
        return cls(
            start=args.worker_start_timeout,
            heartbeat=args.worker_heartbeat,
            patience=args.worker_timeout,
            call=args.rollout_timeout,
        )


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


_STARTS: dict[object, tuple[str, float]] = {}  # what is waited for, and since when
_LOCK = threading.Lock()
_reporter: list[object] = []  # first part of the start that the thread in charge reports


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Context of a part of a start; a line every 10 s says what is waited for in all of them."""
    key = object()
    with _LOCK:
        if not _STARTS:
            threading.Thread(target=_report_starts, args=(key,), daemon=True).start()
        _STARTS[key] = what, time.monotonic()
    try:
        yield
    finally:
        with _LOCK:
            del _STARTS[key]


def _report_starts(first: object) -> None:
    """Report until nothing starts, or another thread has taken over since."""
    _reporter[:] = [first]
    while True:
        time.sleep(START_EVERY)
        with _LOCK:
            if not _STARTS or _reporter != [first]:
                return
            now = time.monotonic()
            parts = [f"{what} ({now - since:.0f} s)" for what, since in _STARTS.values()]
        logger.warning("starting: %s", "; ".join(parts))
