"""Environments answer side by side, within their time limits."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from kedge import background
from kedge.environments.pool import Calls, RunningCalls
from tests.environments.toys import Echo, call_all, prompts, rollouts, sampling


def test_results_and_exceptions_in_order() -> None:
    def fail() -> None:
        raise KeyError("no")

    async def later(x: int) -> int:
        await asyncio.sleep(0.01)
        return x

    def returns_coroutine() -> Any:
        return later(3)

    results = call_all(Calls(timeout=5), [lambda: 1, partial(later, 2), fail, returns_coroutine])
    assert [results[i] for i in (0, 1, 3)] == [1, 2, 3]
    assert isinstance(results[2], KeyError)


def test_at_most_so_many_at_once() -> None:
    running, lock, three = [0], threading.Lock(), threading.Barrier(3, timeout=60)

    def call(i: int) -> int:
        with lock:
            running[0] += 1
            assert running[0] <= 3
        three.wait()
        with lock:
            running[0] -= 1
        three.wait()
        return i

    assert call_all(Calls(most=3), [partial(call, i) for i in range(12)]) == list(range(12))


def test_a_late_call_is_left_behind_and_a_late_coroutine_is_cancelled() -> None:
    release, cancelled, begin = threading.Event(), threading.Event(), time.perf_counter()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    results = call_all(Calls(timeout=1.0), [lambda: 1, release.wait, lambda: 2, hang])
    assert time.perf_counter() - begin < 60
    assert all(isinstance(result, TimeoutError) for result in results[1::2])
    assert results[::2] == [1, 2]
    assert cancelled.wait(60)
    release.set()


class Together(Echo):
    """Its first step ends once those of 64 episodes have begun."""

    def __init__(self, all_began: threading.Barrier) -> None:
        super().__init__(2)
        self.all_began = all_began

    def step(self, response: Any) -> Any:
        if self.turn == 0:
            self.all_began.wait()
        return super().step(response)


class TogetherAsync(Together):
    async def step(self, response: Any) -> Any:  # type: ignore[override]
        if self.turn == 0:
            await asyncio.get_running_loop().run_in_executor(EXECUTOR, self.all_began.wait)
        return Echo.step(self, response)


EXECUTOR = ThreadPoolExecutor(64)


@pytest.mark.parametrize("make", [Together, TogetherAsync])
def test_steps_of_64_episodes_overlap(make: Any) -> None:
    all_began = threading.Barrier(64, timeout=60)
    played = rollouts(lambda: make(all_began), max_turn_tokens=4)
    rollout = played.generate(prompts(64), sampling=sampling(max_new_tokens=99), seed=0)
    assert rollout.terminated.all()


def test_threads_that_need_the_event_loop_at_once_share_one(monkeypatch: Any) -> None:
    make, loops = asyncio.new_event_loop, list[Any]()

    def slow() -> Any:
        time.sleep(0.05)
        loops.append(make())
        return loops[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    background._event_loop.cache_clear()

    async def same(x: int) -> int:
        return x

    assert call_all(Calls(), [lambda i=i: same(i) for i in range(8)]) == list(range(8))
    assert len(loops) == 1


def test_seconds_of_a_call_end_with_the_call_not_when_it_is_asked_for() -> None:
    running = RunningCalls(Calls())
    begin = time.monotonic()
    running.add(0, lambda: None)
    (future,) = running._running
    future.result(60)
    ended = time.monotonic()
    time.sleep(0.05)
    running.wait(1.0)
    assert running.seconds[0] <= ended - begin
