"""Calls in daemon threads, and coroutines on one event loop per process."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

_lock = threading.Lock()  # several threads may start the loop


def in_thread(call: Callable[[], Any], name: str | None = None) -> Future[Any]:
    """Call in a separate thread, which does not keep the process alive if the call hangs."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled any more

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # SystemExit, too
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def on_event_loop(awaitable: Awaitable[Any]) -> Future[Any]:
    """Await on the event loop; cancelling the future cancels a coroutine."""

    async def wait() -> Any:
        return await awaitable

    with _lock:
        loop = _event_loop(os.getpid())
    return asyncio.run_coroutine_threadsafe(wait(), loop)


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process: threads do not survive a fork."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"kedge-loop-{process}", daemon=True).start()
    return loop
