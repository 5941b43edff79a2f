"""Calls in daemon threads, and coroutines on event loops in daemon threads."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_lock = threading.Lock()  # several threads may start a loop


def in_thread(call: Callable[[], Any], name: str | None = None) -> Future[Any]:
    """Call in a separate thread, which does not keep the process alive if the call hangs."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled any more
    threading.Thread(target=_make_call, args=(call, future), name=name, daemon=True).start()
    return future


class CallThread:
    """A daemon thread that makes one call after another; it ends when this object is dropped."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._last: Future[Any] | None = None
        threading.Thread(target=_make_calls, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    @property
    def busy(self) -> bool:
        """Whether a call has not ended."""
        return self._last is not None and not self._last.done()

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """Make the call when earlier ones have ended."""
        self._last = future = Future[Any]()
        future.set_running_or_notify_cancel()  # it cannot be cancelled any more
        self._calls.put(functools.partial(_make_call, call, future))
        return future


def _make_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds objects that would live until the next one


def _make_call(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # SystemExit, too
        future.set_exception(error)


def on_event_loop(awaitable: Awaitable[Any], name: str) -> Future[Any]:
    """Await on the process's event loop ``name``; cancelling the future cancels a coroutine."""

    async def wait() -> Any:
        try:
            return await awaitable
        except (KeyboardInterrupt, SystemExit) as error:  # they would end the loop of all others
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    with _lock:
        loop = _event_loop(os.getpid(), name)
    return asyncio.run_coroutine_threadsafe(wait(), loop)


@functools.cache
def _event_loop(process: int, name: str) -> asyncio.AbstractEventLoop:
    """One per process (threads do not survive a fork) and name (user code may block its loop)."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"kedge-{name}", daemon=True).start()
    return loop
