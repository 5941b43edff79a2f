"""Environments answer side by side, within their time limits; those that fail cost their episode,
or with "raise" the iteration they fall in.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge import background
from kedge.environments.pool import Calls, RunningCalls
from kedge.records.errors import RolloutError
from kedge.records.protocols import NewContext
from tests.e2e.small import rows
from tests.environments.toys import (
    Echo,
    call_all,
    chat_tokenizer,
    played,
    prompts,
    rollouts,
    sampling,
)

KINDS = ["exception", "hang", "garbage", "kill"]
GARBAGE: list[Any] = [
    None,
    ("w5", 1.0, False, False),
    ("w5", float("nan"), False, False, {}),
    ("w5", "1.0", False, False, {}),
    ("w5", 1.0, "no", False, {}),
    (b"w5", 0.0, False, False, {}),
    ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], 0.0, False, False, {}),
    ({"role": "user"}, 0.0, False, False, {}),
    (["w5"], 0.0, False, False, {}),
    ("w5", 1e39, False, False, {}),
    ("w5", 10**400, False, False, {}),
    ("w5", 0.0, False, False, {"metrics": {"x": "y"}}),
    ("w5", 0.0, False, False, {"metrics": [1]}),
]


class Plan:
    """Which of all steps of a run fail, in the order in which they are called."""

    def __init__(self, kind: str, at: set[int]) -> None:
        self.kind, self.at = kind, at
        self.calls = self.failures = 0
        self.lock, self.release = threading.Lock(), threading.Event()

    def fails(self) -> bool:
        with self.lock:
            self.calls += 1
            failed = self.calls in self.at
            self.failures += failed
            return failed


class Flaky(Echo):
    """An environment with a process of its own where the plan kills it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(2)
        self.plan = plan

    def step(self, response: Any) -> Any:
        answer = super().step(response)
        if not self.plan.fails():
            return answer
        if self.plan.kind == "exception":
            raise ValueError("the door is gone")
        if self.plan.kind == "hang":
            self.plan.release.wait(60)
        if self.plan.kind == "garbage":
            return GARBAGE[self.plan.failures % len(GARBAGE)]
        server = subprocess.Popen(["cat"], stdin=subprocess.PIPE, bufsize=0)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        assert server.stdin is not None
        with server.stdin as pipe:
            pipe.write(b"go north\n")
        return answer


@pytest.fixture
def planned() -> Iterator[Callable[..., Plan]]:
    plans: list[Plan] = []

    def plan(kind: str, at: set[int]) -> Plan:
        plans.append(Plan(kind, at))
        return plans[-1]

    yield plan
    for made in plans:
        made.release.set()


def timeout(kind: str) -> float:
    """Seconds for a call: also those that answer at once may have to wait for a core."""
    return 1.0 if kind == "hang" else 60.0


def flaky(plan: Plan, lag: int, on_error: str, **options: Any) -> Any:
    play = {"on_env_error": on_error, "environment_timeout": timeout(plan.kind)}
    return played(environment=lambda: Flaky(plan), max_lag=lag, **play, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_episode_is_dropped_or_scored(kind: str, planned: Any) -> None:
    for on_error in ("drop", "score"):
        plan = planned(kind, {6})
        play = rollouts(
            lambda plan=plan: Flaky(plan),
            on_env_error=on_error,
            env_error_score=-2.0,
            timeout=timeout(kind),
            max_turn_tokens=3,
        )
        rollout = play.generate(prompts(4), sampling=sampling(), seed=0)
        assert rollout.episodes is not None
        assert int((~rollout.episodes.valid).sum()) == (on_error == "drop")
        scored = (rollout.episodes.rewards == -2.0).sum(1)
        assert int(scored.sum()) == (on_error == "score")
        assert rollout.episodes.metrics["environment/errors"] == (1.0, 4.0)
        assert int(rollout.terminated.sum()) == (4 if on_error == "score" else 3)


@pytest.mark.parametrize("answer", GARBAGE)
def test_an_answer_of_a_wrong_kind_is_described(answer: Any) -> None:
    class Wrong(Echo):
        def step(self, response: Any) -> Any:
            return answer

    play = rollouts(Wrong, on_env_error="drop", max_turn_tokens=3)
    episodes = play.generate(prompts(1), sampling=sampling(), seed=0).episodes
    assert episodes is not None
    assert episodes.columns["error"][0].startswith("RolloutError: ")


def test_a_failing_reset_leaves_an_untrained_row() -> None:
    class Broken(Echo):
        def reset(self, *, seed: int, options: Any) -> Any:
            if options["prompt"][0]["content"] == "w4 w5":
                raise ConnectionError("no server")
            return super().reset(seed=seed, options=options)

    for on_error in ("drop", "score"):
        play = rollouts(Broken, on_env_error=on_error)
        rollout = play.generate(prompts(4), sampling=sampling(), seed=0)
        assert rollout.episodes is not None
        assert rollout.episodes.valid.tolist() == [True, False, True, True]
        assert rollout.response_mask[1].sum() == 1
        assert not bool(rollout.loss_mask[1].any())


def test_a_failing_factory_and_an_exit_are_failures() -> None:
    class Exits(Echo):
        def step(self, response: Any) -> Any:
            raise SystemExit(3)

    def missing() -> Any:
        raise ImportError("no module")

    with pytest.raises(RolloutError, match=r"Exits.step failed.*SystemExit: 3"):
        rollouts(Exits).generate(prompts(), sampling=sampling(), seed=0)
    with pytest.raises(
        RolloutError,
        match=r"making the environment of row \d failed: ImportError.*fix the environment$",
    ):
        rollouts(missing).generate(prompts(), sampling=sampling(), seed=0)


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.model.named_parameters()}


def assert_equal(one: Any, other: Any) -> None:
    for (name, a), b in zip(weights(one).items(), weights(other).values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("kind", "lag"), [("exception", 1), ("hang", 0)])
def test_training_drops_failed_episodes(kind: str, lag: int, planned: Any) -> None:
    plan = planned(kind, {5, 14, 21})
    made = flaky(plan, lag, "drop", total_episodes=12)
    made.train()
    assert plan.failures == 3
    assert len(rows(made)) == 3
    assert sum(row["rollout/dropped_rows"] for row in rows(made)) == 3
    assert sum(row["environment/errors"] for row in rows(made)) == pytest.approx(3 / 4)


def whole(lag: int, episodes: int) -> Any:
    make = lambda: Flaky(Plan("none", set()))  # noqa: E731
    made = played(environment=make, max_lag=lag, total_episodes=episodes)
    made.train()
    return made


@pytest.mark.parametrize(("kind", "lag"), [("exception", 0), ("exception", 1)])
def test_a_raised_failure_costs_its_iteration(kind: str, lag: int, planned: Any) -> None:
    plan = planned(kind, {5, 21})
    made, done = flaky(plan, lag, "raise", total_episodes=8), []
    for _ in plan.at:  # training starts again after each failure
        said = r"Flaky.step failed in turn \d of row \d: ValueError: the door.*on_env_error"
        with pytest.raises(RolloutError, match=said):
            made.train()
        done.append(made.engine.step)
    made.train()
    assert made.engine.step == 2
    assert done == sorted(done)
    if lag == 0:
        assert done == [0, 1]
        assert_equal(made, whole(0, 8))


@pytest.mark.parametrize("lag", [0, 1])
def test_resume_is_exact(lag: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"total_episodes": 16, "save_strategy": "steps", "save_steps": 2}
    options |= {"environment": Echo, "max_lag": lag, "output_dir": str(tmp_path)}
    one = played(**options)
    one.train()
    two = played(**options)
    two.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(one, two)


def test_recorded_episodes_are_replayed(tmp_path: Path) -> None:
    folder = str(tmp_path / "recorded")
    one = played(environment=Echo, save_rollouts=folder)
    one.train()
    failing = lambda: Flaky(Plan("exception", {1}))  # noqa: E731
    two = played(environment=failing, replay_rollouts=folder)
    two.train()
    assert_equal(one, two)
    assert rows(two)[-1]["environment/turns"] == rows(one)[-1]["environment/turns"] == 3


def test_a_late_coroutine_is_cancelled() -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    (result,) = call_all(Calls(timeout=0.1), [hang])
    assert isinstance(result, TimeoutError)
    assert cancelled.wait(60)


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


class Unprintable(Exception):
    def __str__(self) -> str:
        raise TypeError("no message")


def stops(_: Any) -> Any:
    return next(iter(()))


def exits(_: Any) -> Any:
    raise SystemExit(3)


def cannot_be_printed(_: Any) -> Any:
    raise Unprintable


async def exits_async(_: Any) -> Any:
    raise SystemExit(3)


BAD_ANSWERS: list[tuple[Any, str]] = [
    ([10**6], "holds token 1000000, but the vocabulary has 32 tokens"),
    ([5, -1], "holds token -1, but"),
    ([10**30], "but the vocabulary has 32 tokens"),
    (NewContext([5, 10**6]), "holds token 1000000, but"),
    (torch.tensor([5.5]), "must hold integers in one dimension, got a Tensor of torch.float32"),
    (torch.ones(2, 2).long(), r"in one dimension, .*shape \(2, 2\)"),
    ([True], "a message must be a mapping"),
    (stops, "StopIteration"),
    (exits, "SystemExit: 3"),
    (exits_async, "SystemExit: 3"),
    (cannot_be_printed, "Unprintable .its message cannot be printed."),
]


class AnswersBadly(Echo):
    """Its second environment answers badly, once: in ``reset``, or in its second step."""

    def __init__(self, made: list[Any], answer: Any, method: str) -> None:
        super().__init__()
        made.append(self)
        self.answer, self.bad = answer, len(made) == 2 and method

    def bad_answer(self) -> Any:
        return self.answer(self) if callable(self.answer) else self.answer

    def reset(self, *, seed: int, options: Any) -> Any:
        usual = super().reset(seed=seed, options=options)
        if self.bad != "reset":
            return usual
        self.bad, bad = "", self.bad_answer()
        return bad if inspect.isawaitable(bad) else (bad, {})

    def step(self, response: Any) -> Any:
        usual = super().step(response)
        if self.bad != "step":
            return usual
        self.bad, bad = "", self.bad_answer()
        return bad if inspect.isawaitable(bad) else (bad, *usual[1:])


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(("answer", "text"), BAD_ANSWERS)
def test_whatever_an_environment_answers_costs_its_episode(
    answer: Any, text: str, method: str
) -> None:
    if method == "reset" and isinstance(answer, NewContext):
        text = "a message must be a mapping|holds token"
    made: list[Any] = []
    trainer = played(environment=lambda: AnswersBadly(made, answer, method), on_env_error="drop")
    trainer.train()
    assert rows(trainer)[0]["environment/errors"] == 0.25
    assert trainer.engine.step == 2
    made = []
    trainer = played(environment=lambda: AnswersBadly(made, answer, method))
    with pytest.raises(RolloutError, match=rf"AnswersBadly.{method} failed .*(?:{text})"):
        trainer.train()


def test_a_long_observation_is_cut_before_it_is_tokenized(monkeypatch: Any) -> None:
    words = chat_tokenizer()
    longest = 0

    def encode(text: Any, **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, *(len(t) for t in ([text] if isinstance(text, str) else text)))
        return call(words, text, **options)

    class Long(Echo):
        def step(self, response: Any) -> Any:
            return "w7 " * 400_000, *super().step(response)[1:]

    call = type(words).__call__
    monkeypatch.setattr(type(words), "__call__", lambda _, text, **kw: encode(text, **kw))
    trainer = played(environment=Long, processing_class=words)
    trainer.train()
    assert longest < 1000  # 40 tokens an episode; the observation has 1.2 million characters
    assert rows(trainer)[0]["environment/turns"] > 1
