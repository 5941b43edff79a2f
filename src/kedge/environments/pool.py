"""A pool of reusable environments, and concurrent calls of their methods."""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

from kedge.background import CallThread, in_thread, on_event_loop
from kedge.environments.episode import Episode
from kedge.records.errors import RolloutError, describe_error
from kedge.records.protocols import (
    Closable,
    Environment,
    EnvironmentInfo,
    check_declared,
    read_info,
)

logger = logging.getLogger(__name__)
_DECLARED = ("tools", "final_reward", "reads_calls", "separator", "grading", "target")
MakeEnvironment = Callable[[], Environment]
Place = tuple[Any, CallThread | None]  # an environment and the thread of its methods
_MOST_FAILED = 0.9  # share of the latest episodes that may fail with on_env_error="drop"
_LATEST = 16  # minimum number of latest episodes, otherwise two batches
_NO_ROOM = 0.01  # seconds to wait while all threads are busy


class Calls:
    """Runs functions in threads and coroutines on one event loop.

    No more than ``most`` calls run at the same time.  A call that takes more than ``timeout``
    seconds is left in a daemon thread, which keeps its place until it ends; a coroutine is
    cancelled.
    """

    def __init__(self, *, timeout: float | None = None, most: int = 256) -> None:
        self.timeout, self.most = timeout, most
        self._threads: dict[Future[Any], float] = {}  # start times of calls that have not ended
        self.room = threading.Semaphore(most)

    @property
    def hung(self) -> int:
        """Threads of calls that have exceeded the limit."""
        before = -math.inf if self.timeout is None else time.monotonic() - self.timeout
        return sum(begin < before for begin in list(self._threads.values()))

    def start(
        self, call: Callable[[], Any], thread: CallThread | None = None
    ) -> Future[tuple[Any, float]]:
        """Run a call in a place of ``room``; the future has its result or exception, and seconds.

        Cancelling the future cancels a coroutine.  Other calls run in ``thread``, or a new one.
        """
        future: Future[tuple[Any, float]] = Future()
        begin = time.monotonic()

        def end(done: Future[Any]) -> None:
            try:
                result = done.result()
            except BaseException as error:  # SystemExit, too; a coroutine may cancel itself
                result = error
            self._threads.pop(future, None)
            self.room.release()
            with suppress(InvalidStateError):  # the call has already timed out
                future.set_result((result, time.monotonic() - begin))

        def work() -> Any:
            result = call()
            if inspect.isawaitable(result):
                return on_event_loop(result, "environments").result(self.timeout)
            return result

        if inspect.iscoroutinefunction(call):
            running = on_event_loop(call(), "environments")
            future.add_done_callback(lambda _: running.cancel())
        else:
            self._threads[future] = begin
            running = in_thread(work, "environment") if thread is None else thread.start(work)
        running.add_done_callback(end)
        return future


class RunningCalls:
    """Calls by key; each starts as soon as ``calls`` has room."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._waiting: deque[tuple[int, Callable[[], Any], CallThread | None]] = deque()
        self._running: dict[Future[tuple[Any, float]], tuple[int, float]] = {}  # -> key, start
        self.seconds: dict[int, float] = {}  # of the calls that ``wait`` last returned

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, key: int, call: Callable[[], Any], thread: CallThread | None = None) -> None:
        """Start a call, in a thread or a new one, as soon as there is room."""
        self._waiting.append((key, call, thread))
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._calls.room.acquire(blocking=False):
            key, call, thread = self._waiting.popleft()
            self._running[self._calls.start(call, thread)] = key, time.monotonic()

    def wait(self, seconds: float) -> dict[int, Any]:
        """Results and exceptions by key; waits until there is one, at most ``seconds``.

        Raises RolloutError if hung calls occupy all places.
        """
        calls = self._calls
        if self._waiting:  # a call of another pool may end
            if calls.hung >= calls.most:
                raise RolloutError(
                    f"{calls.hung} calls of environments hang, each for longer than"
                    f" {calls.timeout:g} s, and no others may run next to them"
                    " (environment_concurrency); fix the environment, and resume"
                )
            seconds = min(seconds, _NO_ROOM)
            time.sleep(0.0 if self._running else seconds)
        done, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        ended = {self._running.pop(future)[0]: future.result() for future in done}
        for future, (key, begin) in list(self._running.items()):
            taken = time.monotonic() - begin
            if calls.timeout is not None and taken > calls.timeout and future.cancel():
                del self._running[future]
                ended[key] = TimeoutError(f"environment_timeout={calls.timeout:g} exceeded"), taken
        self.seconds = {key: taken for key, (_, taken) in ended.items()}
        self._start_waiting()
        return {key: result for key, (result, _) in ended.items()}

    def abandon(self, ended: Callable[[int, BaseException | None], None]) -> None:
        """Forget all calls; ``ended`` gets the key and error of each when it has ended."""

        def tell(key: int, future: Future[tuple[Any, float]]) -> None:
            result, _ = future.result()
            ended(key, result if isinstance(result, BaseException) else None)

        for key, *_ in self._waiting:
            ended(key, None)
        for future, (key, _) in self._running.items():
            future.add_done_callback(partial(tell, key))
        self._waiting.clear()
        self._running.clear()


class Lease:
    """The environment of a finished episode, for reward functions to read before it is reused.

    ``release`` frees it, as does the end of the last rollout that has the lease.  Environments stay
    in their process: copies for another one are None.
    """

    def __init__(self, pool: EnvironmentPool, episode: Episode) -> None:
        self._pool, self._episode = pool, episode
        target = read_info(episode.environment, EnvironmentInfo).target
        self.environment = episode.environment if target is None else target
        self.released = False
        pool.leases.add(self)

    def release(self) -> None:
        """Return the environment to its pool."""
        if not self.released:
            self.released, self.environment = True, None
            self._pool.release(self._episode)

    def __del__(self) -> None:
        # The garbage collector may run within a thread that holds locks of the pool.
        if not self.released:
            self.released = True
            self._pool.dropped.append(self._episode)

    def __reduce__(self) -> Any:
        return type(None), ()


class EnvironmentPool:
    """Environments, one for each running episode; several engines may share them.

    The methods of an environment, if ``step`` is not async, run in one thread, which makes it, too:
    connections to SQLite and others can only be used where they were made.

    ``make`` is ``make_environment`` of EnvironmentRollouts, ``on_error`` ``on_env_error`` of
    EpisodeLimits.
    """

    def __init__(
        self,
        make: MakeEnvironment | Mapping[str, MakeEnvironment],
        calls: Calls,
        *,
        on_error: Literal["raise", "drop", "score"],
    ) -> None:
        self.calls, self.on_error = calls, on_error
        self._make: Mapping[Any, MakeEnvironment] = (
            make if isinstance(make, Mapping) else {None: make}
        )
        # Environments free for a new episode, by name, with their threads.
        self._idle: dict[object, list[Place]] = {}
        self._lock = threading.Lock()
        self._round = 0  # environments of an earlier round are closed instead of reused
        self._closing: list[Future[Any]] = []
        self._failures: list[str] = []  # of close() of failed environments
        self._unclosed: list[Place] = []  # failed environments for whose close() there was no room
        self.dropped: deque[Episode] = deque()  # of leases that have ended, to be released
        self.leases: WeakSet[Lease] = WeakSet()
        self._errors: list[str] = []  # of the latest episodes; "" if there was none

    def check_errors(self, rows: int) -> None:
        """Stop if too many of the latest episodes failed, before a batch of ``rows`` begins."""
        count = max(_LATEST, 2 * rows)
        with self._lock:
            latest = self._errors = self._errors[-count:]
        failed = [error for error in latest if error]
        if self.on_error == "drop" and len(failed) >= _MOST_FAILED * count:
            raise RolloutError(
                f"{len(failed)} of the latest {count} episodes failed, the last with {failed[-1]};"
                f" on_env_error='drop' allows less than {_MOST_FAILED:.0%} failures: fix the"
                " environment, and resume"
            )

    def _name(self, episode: Episode) -> Any:
        """The name of the environment that the row asks for; None if there is one kind."""
        name = None if None in self._make else episode.options.get("environment")
        if name not in self._make:
            raise RolloutError(
                f"the column 'environment' must name one of {', '.join(self._make)}, got {name!r}"
            )
        return name

    def reset(self, episode: Episode, seed: int) -> Callable[[], Any]:
        """The call that resets an environment for the episode, an idle or a new one."""
        self._release_dropped()
        name = self._name(episode)
        with self._lock:
            episode.round = self._round
            if idle := self._idle.get(name):
                episode.environment, episode.thread = idle.pop()
            else:
                episode.thread = CallThread("environment")

        def call() -> Any:
            if episode.environment is None:
                made = self._make[name]()
                check_declared(made, EnvironmentInfo, *_DECLARED)
                with self._lock:
                    episode.environment = made
                    if inspect.iscoroutinefunction(made.step):
                        episode.thread = None
                    late = episode.round is None  # it took too long, and the episode has ended
                if late:
                    self.release(episode)
                    return None
            return episode.environment.reset(seed=seed, options=episode.options)

        return call

    def release(self, episode: Episode) -> None:
        """Keep the environment for later episodes, or close it if it failed."""
        self._release_dropped()
        self._release(episode)

    def _release_dropped(self) -> None:
        with suppress(IndexError):  # other threads release, too
            while True:
                self._release(self.dropped.popleft())

    def _release(self, episode: Episode) -> None:
        with self._lock:
            environment, episode.environment = episode.environment, None
            thread, episode.thread = episode.thread, None
            reusable = not episode.error and episode.round == self._round
            if episode.done and episode.round is not None:
                self._errors.append(episode.error)
            episode.round = None
            if environment is None:
                return
            if reusable:
                self._idle.setdefault(self._name(episode), []).append((environment, thread))
            elif not isinstance(environment, Closable):
                return
            elif self.calls.room.acquire(blocking=False):  # close() may hang, too
                ended = [future for future in self._closing if future.done()]
                self._closing = [future for future in self._closing if future not in ended]
                self._failures += _failures(ended)
                self._closing.append(self.calls.start(environment.close, _free(thread)))
            else:
                self._unclosed.append((environment, thread))

    def close(self) -> None:
        """Close the idle and leased environments, and those in use once they are released."""
        for lease in list(self.leases):  # of rollouts whose rewards failed
            lease.release()
        self._release_dropped()
        with self._lock:
            self._round += 1
            idle = [*self._unclosed, *(x for some in self._idle.values() for x in some)]
            closing, self._closing = self._closing, []
            failures, self._failures = self._failures, []
            self._idle.clear()
            self._unclosed.clear()
        close_all(idle, self.calls, closing, failures)


def _free(thread: CallThread | None) -> CallThread | None:
    """The thread, unless a call hangs there."""
    return None if thread is None or thread.busy else thread


def _failures(calls: Iterable[Future[tuple[Any, float]]]) -> list[str]:
    """The errors of calls that have ended."""
    results = [call.result()[0] for call in calls]
    return [describe_error(x) for x in results if isinstance(x, BaseException)]


def close_all(
    environments: Iterable[Place],
    calls: Calls,
    closing: Iterable[Future[tuple[Any, float]]] = (),
    failed: Iterable[str] = (),
) -> None:
    """Close environments in their threads; failures and timeouts are logged.

    With those of calls of ``close`` that have started, and of others that have failed.
    """
    running = RunningCalls(Calls(timeout=calls.timeout, most=calls.most))  # others may hang
    for key, (environment, thread) in enumerate(environments):
        if isinstance(environment, Closable):
            running.add(key, environment.close, _free(thread))
    failures = [*failed]
    while len(running):
        try:
            results = running.wait(1.0)
        except RolloutError as error:  # all hang
            failures += [str(error)] * len(running)
            break
        failures += [describe_error(x) for x in results.values() if isinstance(x, BaseException)]
    ended, hanging = wait(closing, timeout=calls.timeout)
    failures += _failures(ended)
    failures += [f"no end within {calls.timeout:g} s"] * len(hanging)
    if failures:
        logger.warning(
            "close() of %d environments failed, the last with %s", len(failures), failures[-1]
        )
