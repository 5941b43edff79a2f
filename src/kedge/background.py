"""Calls in daemon threads, coroutines on event loops, and how threads are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

_lock = threading.Lock()  # several threads may start a loop
_stop: ContextVar[threading.Event | None] = ContextVar("stop", default=None)


class Stopped(BaseException):
    """The result of this thread is no longer needed; not a failure, so not an ``Exception``."""


def check_stop() -> None:
    """Raise ``Stopped`` if this thread should stop.

    Called between tokens, turns and requests, wherever a rollout engine may be busy for long.
    """
    event = _stop.get()
    if event is not None and event.is_set():
        raise Stopped


@contextlib.contextmanager
def stopped_by(event: threading.Event) -> Iterator[None]:
    """Context in which ``check_stop`` looks at ``event``; threads get it with their context."""
    token = _stop.set(event)
    try:
        yield
    finally:
        _stop.reset(token)


def in_thread(call: Callable[[], Any], name: str | None = None) -> Future[Any]:
    """Call in a separate thread, which does not keep the process alive if the call hangs."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled any more
    threading.Thread(target=_make_call, args=(call, future), name=name, daemon=True).start()
    return future


class CallThread:
    """A daemon thread that makes one call after another; it ends when this object is dropped.

    The thread starts with the first call.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._last: Future[Any] | None = None
        self._name = name

    @property
    def busy(self) -> bool:
        """Whether a call has not ended."""
        return self._last is not None and not self._last.done()

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """Make the call when earlier ones have ended."""
        if self._last is None:
            make_calls = functools.partial(_make_calls, self._calls)
            threading.Thread(target=make_calls, name=self._name, daemon=True).start()
            weakref.finalize(self, self._calls.put, None)
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
