"""Calls of many environments at the same time, each with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge.errors import RolloutError

_NO_ROOM = 0.01  # seconds to wait for room


class Calls:
    """Runs functions in threads and coroutines on one event loop.

    A call that exceeds the limit is left behind in a daemon thread, which keeps its place among
    the ``most`` until it ends; a coroutine is cancelled.

    Args:
        timeout: seconds that a call may take; None: no limit.
        most: calls that run at the same time.
    """

    def __init__(self, *, timeout: float | None = None, most: int = 256) -> None:
        self.timeout, self.most = timeout, most
        self._begun: dict[Future[Any], float] = {}  # calls in threads, until they end
        self.room = threading.Semaphore(most)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()  # threads of environments may ask for it first

    @property
    def hung(self) -> int:
        """Threads of calls that have exceeded the limit."""
        before = -math.inf if self.timeout is None else time.monotonic() - self.timeout
        return sum(begin < before for begin in list(self._begun.values()))

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call in a place of ``room``; the future has its result or exception."""
        if inspect.iscoroutinefunction(call):
            scheduled = self._schedule(call())
            scheduled.add_done_callback(lambda _: self.room.release())
            return scheduled
        future: Future[Any] = Future()
        self._begun[future] = time.monotonic()

        def work() -> None:
            try:
                result = call()
                if inspect.isawaitable(result):
                    result = self._schedule(result).result(self.timeout)
                settle = partial(future.set_result, result)
            except BaseException as error:  # an environment may even exit
                settle = partial(future.set_exception, error)
            del self._begun[future]
            self.room.release()
            with suppress(InvalidStateError):  # the call was overdue
                settle()

        threading.Thread(target=work, name="environment", daemon=True).start()
        return future

    def _schedule(self, awaitable: Any) -> Future[Any]:
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="environments", daemon=True
                ).start()

        async def result() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(result(), self._loop)


@dataclass(slots=True)
class _Run:
    """A call that was started."""

    key: int
    begin: float
    end: float | None = None

    def stop(self, _: Future[Any]) -> None:
        self.end = time.monotonic()


class RunningCalls:
    """Calls that were started, by key; they run while ``calls`` has room."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self._running: dict[Future[Any], _Run] = {}
        self.seconds: dict[int, float] = {}  # that the calls took which ``wait`` returned last

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, key: int, call: Callable[[], Any]) -> None:
        """Start a call, as soon as there is room."""
        self._waiting.append((key, call))
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._calls.room.acquire(blocking=False):
            key, call = self._waiting.popleft()
            run, future = _Run(key, time.monotonic()), self._calls.start(call)
            future.add_done_callback(run.stop)
            self._running[future] = run

    def wait(self, seconds: float) -> dict[int, Any]:
        """Results and exceptions by key; waits until there is one, at most ``seconds``.

        Raises:
            RolloutError: calls that hang use all the room.
        """
        if self._waiting and self._calls.hung >= self._calls.most:
            raise RolloutError(
                f"{self._calls.hung} calls of environments hang, each for longer than"
                f" {self._calls.timeout:g} seconds, which is all that may run at the same time"
                " (environment_concurrency); fix the environment, and resume"
            )
        if self._waiting:  # others may use the room
            seconds = min(seconds, _NO_ROOM)
            time.sleep(0.0 if self._running else seconds)
        done, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        results: dict[int, Any] = {}
        self.seconds = {}
        for future in done:
            results[self._end(future)] = future.result() if (e := _error(future)) is None else e
        timeout = self._calls.timeout
        before = -math.inf if timeout is None else time.monotonic() - timeout
        for future in [x for x, run in self._running.items() if run.begin < before]:
            future.cancel()
            results[self._end(future)] = TimeoutError(f"no answer within {timeout:g} seconds")
        self._start_waiting()
        return results

    def _end(self, future: Future[Any]) -> int:
        run = self._running.pop(future)
        end = time.monotonic() if run.end is None else run.end
        self.seconds[run.key] = end - run.begin
        return run.key

    def abandon(self, ended: Callable[[int, BaseException | None], None]) -> None:
        """Forget all calls; ``ended`` gets key and error of each once it does not run any more."""

        def tell(key: int, future: Future[Any]) -> None:
            ended(key, _error(future))

        for key, _ in self._waiting:
            ended(key, None)
        for future, run in self._running.items():
            future.add_done_callback(partial(tell, run.key))
        self._waiting.clear()
        self._running.clear()


def _error(future: Future[Any]) -> BaseException | None:
    """The exception of a call that has ended; a coroutine may have cancelled itself."""
    try:
        return future.exception()
    except CancelledError as error:
        return error
