"""Threads that sample while the driver trains, and that end when the driver is interrupted."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

PATIENCE = 5.0  # seconds to wait for an interrupted thread to return from a library


@contextmanager
def join_at_end(
    threads: Sequence[threading.Thread], *, close: Callable[[], None], drop: Callable[[], None]
) -> Iterator[None]:
    """Context in which threads work for the driver; joins them at the end.

    Args:
        threads: started daemon threads.
        close: asks the threads to finish.
        drop: called if the driver is interrupted; the threads end immediately, without results.
    """
    failure = None
    try:
        try:
            yield
        except Exception as error:
            failure = error
        close()
        for thread in threads:
            thread.join()
    except (KeyboardInterrupt, SystemExit):  # also while joining them
        close()
        interrupt(threads)
        drop()
        raise
    if failure is not None:
        raise failure


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
