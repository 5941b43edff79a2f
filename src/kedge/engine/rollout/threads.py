"""Threads that sample while the driver trains, and that an interrupt of the driver ends, too."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 5.0  # seconds that an interrupted thread may take to come out of a library


class Inline(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call ``fn`` now; its result or exception waits in the returned future."""
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # handed over to whoever asks for the result
            future.set_exception(error)
        return future

    @property
    def threads(self) -> list[threading.Thread]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing runs but the caller."""


class Worker(Executor):
    """One thread, first in first out.  Unlike that of a pool, it never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call ``fn`` once everything submitted before is done."""
        future: Future[R] = Future()

        def task() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):  # an interrupt ends the thread
                    raise

        self._tasks.put(task)
        return future

    @property
    def threads(self) -> list[threading.Thread]:
        """The one."""
        return [self._thread]

    def close(self) -> None:
        """Take nothing more; the thread ends once everything submitted is done."""
        self._tasks.put(None)

    def _work(self) -> None:
        with suppress(KeyboardInterrupt):  # which the driver had first
            while (task := self._tasks.get()) is not None:
                task()


@contextmanager
def working(
    threads: Sequence[threading.Thread], *, close: Callable[[], None], drop: Callable[[], None]
) -> Iterator[None]:
    """Inside, threads work for the driver.

    Args:
        threads: daemons, started.
        close: asks them to end what they are at; they are waited for.
        drop: called where the driver is interrupted and they end at once: what they made is void.
    """
    try:
        try:
            yield
        except Exception:
            _end(threads, close)
            raise
        _end(threads, close)
    except (KeyboardInterrupt, SystemExit):  # also while they are waited for
        close()
        interrupt(threads)
        drop()
        raise


def _end(threads: Sequence[threading.Thread], close: Callable[[], None]) -> None:
    close()
    for thread in threads:
        thread.join()


def interrupt(threads: Sequence[threading.Thread], *, patience: float = PATIENCE) -> None:
    """Raise ``KeyboardInterrupt`` in threads, as Ctrl-C does in the main one, and wait a little.

    It is raised between two steps of Python: a loop over tokens ends with the token, a library that
    does not come back is left behind in its daemon thread.

    Args:
        threads: those that shall end.
        patience: most seconds to wait for all of them.
    """
    running = [thread for thread in threads if thread.is_alive()]
    raised = ctypes.py_object(KeyboardInterrupt)
    for thread in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), raised)
    until = time.monotonic() + patience
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))
