"""Processes that do not respond: stopped, hung, or only busy.

A busy process may be silent for long, for instance while compiled code holds Python's global lock.
A stopped one (SIGSTOP) never responds, and the operating system knows its state.  So a stopped
process counts as lost after seconds, and any other only after the user's ``worker_timeout``.

A batch system may suspend all processes of a job for hours (``scontrol suspend``).
Silence therefore counts only while the process that waits is running itself (``RunningTime``).
Timeouts of gloo, of NCCL between learners and of HTTP count elapsed time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import psutil

logger = logging.getLogger(__name__)
LOOK_AFTER = 2.0  # seconds of silence, after which the state of a process is read
WARN_AFTER = 8.0  # seconds of silence, after which it is reported
STOPPED_FOR = 1.0  # seconds that a process must be stopped; debuggers and profilers stop briefly


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped; False if it has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def stays_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped now and a second later; blocks until then."""
    if not is_stopped(pid):
        return False
    time.sleep(STOPPED_FOR)
    return is_stopped(pid)


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


class HungCheck:
    """Decides when a process that does not respond counts as hung, and reports a long silence.

    Args:
        name: for messages, e.g. "engine 0: process 17 on 10.0.0.1".
        patience: seconds of silence after which it counts as hung.
        stopped: whether it is stopped, as far as is known; never blocks.
    """

    def __init__(self, name: str, patience: float, stopped: Callable[[], bool]) -> None:
        self._name, self._patience, self._stopped = name, patience, stopped
        self._silence, self._warned = RunningTime(), False

    def reason(self) -> str | None:
        """Why it counts as hung; None: it does not.  To be called at least once a second."""
        silent = self._silence.seconds()
        if silent > LOOK_AFTER and self._stopped():
            return "was stopped by a signal (SIGSTOP)"
        if silent > self._patience:
            return f"did not respond for {self._patience:g} s (worker_timeout)"
        if silent > WARN_AFTER and not self._warned:
            self._warned = True
            logger.warning("%s", silence(self._name, self._patience))
        return None


def silence(name: str, patience: float) -> str:
    """The warning about a process that does not respond, but may be busy."""
    return (
        f"{name} has not responded for {WARN_AFTER:g} s; it may be busy, and counts as hung after"
        f" {patience:g} s without a response (worker_timeout)"
    )


@contextlib.contextmanager
def reporting_silence(name: str, patience: float) -> Iterator[None]:
    """Context that waits for a response, and reports if that takes long."""
    timer = threading.Timer(WARN_AFTER, logger.warning, ["%s", silence(name, patience)])
    timer.daemon = True
    if patience > WARN_AFTER:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watch_group(leader: subprocess.Popen[bytes], *, every: float = 3.0) -> None:
    """Kill a vLLM server of which a process is stopped; returns then, or at the server's end.

    Calls that wait for the server then fail, as for any other death.

    Args:
        leader: of the server's process group: ``process_guard``, which ends the server with a run.
        every: seconds between checks; two in a row must find the same process stopped.
    """
    before: set[int] = set()
    while leader.poll() is None:
        begin = time.monotonic()
        time.sleep(every)
        found = {member.pid for member in _members(leader.pid) if is_stopped(member.pid)}
        if time.monotonic() - begin > every + RunningTime.GAP:  # this process was stopped as well
            found = set()
        if both := found & before:
            logger.warning(
                "the vLLM server is killed, because its process %d was stopped by a signal"
                " (SIGSTOP)",
                min(both),
            )
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGKILL)
            return
        before = found
    time.sleep(every)  # for a server that is being stopped
    if left := _members(leader.pid):
        logger.warning(
            "the process that ends the vLLM server with this run was killed; sampling continues,"
            " but if this run is killed (SIGKILL), end the server with: kill %d",
            min(member.pid for member in left),
        )


def _members(group: int) -> list[psutil.Process]:
    """The running processes of a process group but its leader."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            other = process.pid != group and os.getpgid(process.pid) == group
            if other and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members
