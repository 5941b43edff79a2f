"""Threads that sample while the driver trains, and that end when the driver is interrupted."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 5.0  # seconds to wait for an interrupted thread to return from a library


class Inline(Executor):
    """Runs submitted calls immediately, in the caller's thread."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call ``fn`` now; the returned future has its result or exception."""
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # re-raised by result()
            future.set_exception(error)
        return future

    @property
    def threads(self) -> list[threading.Thread]:
        """No threads."""
        return []

    def close(self) -> None:
        """Does nothing."""


def on_current_gpu(target: Callable[P, R]) -> Callable[P, R]:
    """``target`` for a new thread, with this thread's current GPU: new threads have the first."""
    if not torch.cuda.is_initialized():
        return target
    device = torch.cuda.current_device()

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        torch.cuda.set_device(device)
        return target(*args, **kwargs)

    return run


class Worker(Executor):
    """One daemon thread, first in first out; unlike a pool, it never keeps the process alive."""

    def __init__(self, name: str, *, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end  # called by the thread
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=on_current_gpu(self._work), name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call ``fn`` after everything submitted before."""
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
        """The worker thread."""
        return [self._thread]

    def close(self) -> None:
        """The thread ends once all submitted calls are done."""
        self._tasks.put(None)

    def _work(self) -> None:
        try:
            with suppress(KeyboardInterrupt):  # the driver was interrupted first
                while (task := self._tasks.get()) is not None:
                    task()
        finally:
            self._on_end()


@contextmanager
def working(
    threads: Sequence[threading.Thread], *, close: Callable[[], None], drop: Callable[[], None]
) -> Iterator[None]:
    """Context in which threads work for the driver; joins them at the end.

    Args:
        threads: started daemon threads.
        close: asks the threads to finish.
        drop: called if the driver is interrupted: the threads end at once, their results are void.
    """
    try:
        try:
            yield
        except Exception:
            _join(threads, close)
            raise
        _join(threads, close)
    except (KeyboardInterrupt, SystemExit):  # also while joining them
        close()
        interrupt(threads)
        drop()
        raise


def _join(threads: Sequence[threading.Thread], close: Callable[[], None]) -> None:
    close()
    for thread in threads:
        thread.join()


def interrupt(threads: Sequence[threading.Thread], *, patience: float = PATIENCE) -> None:
    """Raise ``KeyboardInterrupt`` in threads, as Ctrl-C does in the main one, and wait briefly.

    It is raised between two bytecodes: a loop over tokens ends after the current token; a thread
    stuck in a library call is left behind as a daemon.

    Args:
        threads: the threads to end.
        patience: maximum total wait in seconds.
    """
    running = [thread for thread in threads if thread.is_alive()]
    exception = ctypes.py_object(KeyboardInterrupt)
    for thread in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), exception)
    deadline = time.monotonic() + patience
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
