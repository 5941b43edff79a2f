"""One event loop in a thread, for asynchronous reward functions.

It lives as long as the process, so that a client opened by a reward function in one step still
works in the next, and a loop that already runs in the calling thread does not matter.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0  # process that started the loop: threads do not survive a fork


def submit(awaitable: Awaitable[Any]) -> Future[Any]:
    """Run ``awaitable`` on the background loop."""

    async def wait() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), _running())


def _running() -> asyncio.AbstractEventLoop:
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="kedge-rewards", daemon=True).start()
        return _loop
