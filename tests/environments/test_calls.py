"""Environments answer side by side, within their time limits."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest

from kedge.environments.calls import Calls, RunningCalls
from tests.environments.toys import Echo, engine, prompts, rollouts, sampling


def test_results_and_exceptions_in_order() -> None:
    def fail() -> None:
        raise KeyError("no")

    async def later(x: int) -> int:
        await asyncio.sleep(0.01)
        return x

    def returns_coroutine() -> Any:
        return later(3)

    results = Calls(timeout=5)([lambda: 1, partial(later, 2), fail, returns_coroutine])
    assert results[:2] == [1, 2]
    assert isinstance(results[2], KeyError)
    assert results[3] == 3


def test_at_most_so_many_at_once() -> None:
    running, most, lock = [0], [0], threading.Lock()

    def call(i: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        return i

    assert Calls(most=3)([partial(call, i) for i in range(12)]) == list(range(12))
    assert most[0] == 3


def test_a_late_call_is_left_behind() -> None:
    release = threading.Event()
    begin = time.perf_counter()
    results = Calls(timeout=0.1)([lambda: 1, release.wait, lambda: 2])
    assert time.perf_counter() - begin < 2
    assert isinstance(results[1], TimeoutError)
    assert results[::2] == [1, 2]
    release.set()


def test_a_late_coroutine_is_cancelled() -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    (result,) = Calls(timeout=0.1)([hang])
    assert isinstance(result, TimeoutError)
    assert cancelled.wait(5)


class Slow(Echo):
    """200 ms of latency in each call; reset answers at once."""

    latency = 0.2

    def step(self, response: Any) -> Any:
        time.sleep(self.latency)
        return super().step(response)


class SlowAsync(Slow):
    async def step(self, response: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(self.latency)
        return Echo.step(self, response)


@pytest.mark.parametrize("make", [Slow, SlowAsync])
def test_latencies_of_64_episodes_overlap(make: Any) -> None:
    """64 episodes take at most 1.3 times the latencies of one and the time of the model."""
    model = engine()
    options: dict[str, Any] = {"max_turns": 5, "max_turn_tokens": 4}

    def seconds(kind: Any) -> float:
        play = rollouts(lambda: kind(5), inner=model, **options)
        begin = time.perf_counter()
        play.generate(prompts(64), sampling=sampling(max_new_tokens=99), seed=0)
        return time.perf_counter() - begin

    seconds(Echo)  # compiles the template
    for _ in range(6):  # other processes may disturb a measurement
        if seconds(make) <= 1.3 * (seconds(Echo) + 5 * Slow.latency):
            return
    raise AssertionError("latencies do not overlap")


def test_threads_that_need_the_event_loop_at_once_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, loops = asyncio.new_event_loop, list[Any]()

    def slow() -> Any:
        time.sleep(0.05)
        loops.append(make())
        return loops[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", slow)

    async def same(x: int) -> int:
        return x

    def call(x: int) -> Any:
        return same(x)

    assert Calls()([partial(call, i) for i in range(8)]) == list(range(8))
    assert len(loops) == 1


def test_seconds_of_a_call_end_with_the_call_not_when_it_is_asked_for() -> None:
    running: RunningCalls[str] = RunningCalls(Calls())
    running.add("short", lambda: None)
    time.sleep(0.3)
    running.wait(1.0)
    assert running.seconds["short"] < 0.2
