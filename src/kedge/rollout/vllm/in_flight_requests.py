"""Requests to a server that stay open between calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

import httpx

T = TypeVar("T")
Send = Callable[[httpx.AsyncClient], Awaitable[T]]  # sends a request, and reads its result


class InFlightRequests(Generic[T]):
    """Requests by key, and their results as they arrive.

    The server works on all of them between calls of ``wait``; connections are read within.

    Args:
        connect: makes a client of the server.
    """

    def __init__(self, connect: Callable[[], httpx.AsyncClient]) -> None:
        self._connect = connect
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None
        self._arrived = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._results: dict[int, T] = {}
        self._error: Exception | None = None
        self._heard = 0.0  # when a result arrived last, or the first request was sent

    @property
    def holds(self) -> bool:
        """Whether there are requests, or results or an error to be returned."""
        return bool(self._tasks or self._results or self._error)

    def silent(self) -> float:
        """Seconds since the server was heard of; 0 without requests."""
        return time.monotonic() - self._heard if self._tasks else 0.0

    def heard(self) -> None:
        """The server has responded."""
        self._heard = time.monotonic()

    def wait(self, new: Mapping[int, Send[T]], seconds: float) -> dict[int, T]:
        """Send new requests, and wait until a result arrives, at most ``seconds``.

        Raises:
            Exception: the first that a request raised, after all results are returned.
        """
        return self._run(self._wait(new, seconds)) if new or self.holds else {}

    async def _wait(self, new: Mapping[int, Send[T]], seconds: float) -> dict[int, T]:
        if not self._tasks:
            self.heard()
        for key, send in new.items():
            self._tasks[key] = asyncio.create_task(self._send(key, send))
        if not (self._results or self._error):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)
        self._arrived.clear()
        if self._results:
            self.heard()
        elif self._error is not None:
            raise self._error
        results, self._results = self._results, {}
        return results

    async def _send(self, key: int, send: Send[T]) -> None:
        if self._client is None:
            self._client = self._connect()
        try:
            self._results[key] = await send(self._client)
        except Exception as error:  # raised by ``wait``
            self._error = self._error or error
        del self._tasks[key]
        self._arrived.set()

    def cancel(self) -> None:
        """Drop all requests; the server stops working on them as their connections close."""
        if self._loop is not None:
            self._run(self._cancel())
            self._loop.close()
            self._loop = None

    async def _cancel(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
        self._client, self._error = None, None
        self._tasks.clear()
        self._results.clear()
        self._arrived = asyncio.Event()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(_report)
        return self._loop.run_until_complete(work)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error in a callback, except that a Unix socket closed while it was waited for."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)
