"""Graceful shutdown: on SIGINT, SIGTERM or SIGHUP, finish the iteration, checkpoint and exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # a closed terminal; nohup lets it be ignored, which stays so
    SIGNALS.append(signal.SIGHUP)


class GracefulShutdown:
    """Records stop signals: the first requests a shutdown, a second of the same kind exits at once.

    A launcher may send SIGTERM after the Ctrl-C that all its processes got; both count as one
    request.
    """

    def __init__(self) -> None:
        self._number = 0
        self._seen: set[int] = set()
        self._process = os.getpid()
        self._before: dict[int, Any] = {}  # handlers that this one replaces

    @contextmanager
    def install(self) -> Iterator[None]:
        """Within this context, SIGINT, SIGTERM and SIGHUP only record a request.

        Signals that the program handles itself are left to it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can handle signals
            return
        free = [n for n in SIGNALS if not _is_handled(n)]
        self._before = {n: signal.signal(n, self._handle) for n in free}
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a fork, such as a worker that a reward function ends
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
            return
        first = not self._number
        self._number = self._number or number
        if number in self._seen:
            self._raise()
        self._seen.add(number)
        if first:
            name = signal.Signals(number).name
            text = f"kedge: {name}: stopping after this iteration; again: stopping at once\n"
            with contextlib.suppress(OSError):  # the reader may be gone
                os.write(2, text.encode())  # signal handlers must not use buffered output

    @property
    def requested(self) -> bool:
        """Whether a shutdown was requested."""
        return bool(self._number)

    def reraise(self) -> None:
        """Raise what the signal would have raised: KeyboardInterrupt or SystemExit."""
        if self._number:
            self._raise()

    def _raise(self) -> None:
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self._number)


class _Exit:
    """A handler that exits as a program does by itself, in the process that made it alone."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise SystemExit(128 + number)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Within this context SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt.

    Otherwise they end Python at once and leave servers, folders and shared memory behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    free = [n for n in SIGNALS if n != signal.SIGINT and not _is_handled(n)]
    before = {number: signal.signal(number, _Exit()) for number in free}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_handled(number: int) -> bool:
    """Whether the program handles or ignores a signal; Ray's handler only ends the process."""
    handler: Any = signal.getsignal(number)
    if handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, _Exit):
        return False
    return not str(getattr(handler, "__module__", "")).startswith("ray.")


def exit_with(parent: int, *, every: float = 1.0) -> None:
    """End this process as soon as its parent is gone; checked ``every`` seconds.

    The parent of an actor is the raylet of its node.  Without it, Ray lets an actor wait for the
    owners of its objects before it exits.
    """
    while os.getppid() == parent:
        time.sleep(every)
    os._exit(1)
