"""Calls of many environments at the same time, each with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

_POLL = 0.2  # seconds; an interrupt of the calling thread takes effect between two waits


class Calls:
    """Runs functions in threads and coroutines on one event loop.

    A call that exceeds the limit is left behind in a daemon thread; a coroutine is cancelled.

    Args:
        timeout: seconds that a call may take; None: no limit.
        most: calls that run at the same time.
    """

    def __init__(self, *, timeout: float | None = None, most: int = 256) -> None:
        self.timeout, self.most = timeout, most
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The result of each call, or the exception that it raised."""
        results: list[Any] = [None] * len(calls)
        running: dict[Future[Any], tuple[int, float]] = {}
        waiting = iter(enumerate(calls))
        while True:
            while len(running) < self.most and (item := next(waiting, None)) is not None:
                running[self._start(item[1])] = item[0], time.monotonic()
            if not running:
                return results
            done, _ = wait(running, timeout=_POLL, return_when=FIRST_COMPLETED)
            for future in done:
                index, _ = running.pop(future)
                error = future.exception()
                results[index] = future.result() if error is None else error
            for future in self._overdue(running):
                index, _ = running.pop(future)
                future.cancel()
                results[index] = TimeoutError(f"no answer within {self.timeout:g} seconds")

    def _overdue(self, running: dict[Future[Any], tuple[int, float]]) -> list[Future[Any]]:
        if self.timeout is None:
            return []
        before = time.monotonic() - self.timeout
        return [future for future, (_, begin) in running.items() if begin < before]

    def _start(self, call: Callable[[], Any]) -> Future[Any]:
        if inspect.iscoroutinefunction(call):
            return self._schedule(call())
        future: Future[Any] = Future()

        def work() -> None:
            try:
                result = call()
                if inspect.isawaitable(result):
                    result = self._schedule(result).result(self.timeout)
            except BaseException as error:  # an environment may even exit
                _settle(future.set_exception, error)
            else:
                _settle(future.set_result, result)

        threading.Thread(target=work, name="environment", daemon=True).start()
        return future

    def _schedule(self, awaitable: Any) -> Future[Any]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._loop.run_forever, name="environments", daemon=True
            ).start()

        async def result() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(result(), self._loop)


def _settle(set_value: Callable[[Any], None], value: Any) -> None:
    with suppress(InvalidStateError):  # the call was overdue
        set_value(value)
