"""Episodes that an engine with slots plays, each at its own pace."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from kedge.records.types import Metrics
from kedge.rollout.embedded.decode import CausalDecoder
from tests.contract.embedded import drained
from tests.environments.toys import CHAT, Echo, engine, prompts, rollouts, sampling


class Cut(Echo):
    """Gives a reward at the end if a limit ended the episode; some report a metric of their own."""

    def reset(self, *, seed: int, options: Any) -> Any:
        self.won = seed % 2
        return super().reset(seed=seed, options=options)

    def step(self, response: Any) -> Any:
        *others, info = super().step(response)
        won = {"won": 1.0} if self.won and self.turn == 1 else {}
        return *others, {"metrics": info["metrics"] | won}

    def final_reward(self) -> float:
        return 7.0


class Slow(Echo):
    """Takes its time if its seed is odd."""

    seconds = 0.3

    def reset(self, *, seed: int, options: Any) -> Any:
        self.slow = seed % 2
        return super().reset(seed=seed, options=options)

    def step(self, response: Any) -> Any:
        time.sleep(self.seconds * self.slow)
        return super().step(response)


class Wrapped:
    """An engine around another."""

    def __init__(self) -> None:
        self.inner = engine()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("limits", [{}, {"max_turns": 2, "max_turn_tokens": 4}, {"max_turns": 1}])
def test_episodes_in_flight_are_those_of_whole_batches(limits: dict[str, int]) -> None:
    played, batch = rollouts(Cut, engine(chunk_rows=3), **limits), prompts(8)
    want = played.generate(batch, sampling=sampling(min_new_tokens=2), seed=5)
    assert played.slots == 3
    played.submit(batch, sampling=sampling(min_new_tokens=2), seed=5)
    assert played.unfinished == 8
    got = drained(played)
    assert got.response_mask.tolist() == want.response_mask.tolist()
    assert got.ids[got.response_mask].tolist() == want.ids[want.response_mask].tolist()
    assert got.prompts.ids.tolist() == want.prompts.ids.tolist()
    assert got.terminated.tolist() == want.terminated.tolist()
    assert got.episodes is not None
    assert want.episodes is not None
    assert got.episodes.turn.tolist() == want.episodes.turn.tolist()
    assert got.episodes.rewards.tolist() == want.episodes.rewards.tolist()
    assert bool((want.episodes.rewards >= 7.0).any()) or not limits
    for name in want.episodes.columns.keys() - {"totals"}:  # these have seconds
        assert got.episodes.columns[name] == want.episodes.columns[name]
    got_means, want_means = (Metrics(x.episodes.metrics).means() for x in (got, want))
    for name in ("environment/turns", "environment/words"):
        assert got_means[name] == want_means[name]
    won = [float("won" in row) for row in want.episodes.columns["metrics"]]
    assert got_means["environment/won"] == want_means["environment/won"] == sum(won) / 8
    assert 0 < sum(won) < 8
    torch.testing.assert_close(got.behavior_logprobs, want.behavior_logprobs, rtol=0, atol=2e-5)


def test_slow_environments_do_not_delay_other_episodes() -> None:
    others_ended = threading.Event()

    class Waiting(Echo):
        def reset(self, *, seed: int, options: Any) -> Any:
            self.waits = options["prompt"] == CHAT[0]
            return super().reset(seed=seed, options=options)

        def step(self, response: Any) -> Any:
            assert not self.waits or others_ended.wait(60)
            return super().step(response)

    played, order = rollouts(Waiting, engine(chunk_rows=16)), list[int]()
    played.submit(prompts(8), sampling=sampling(max_new_tokens=60), seed=5)
    while played.unfinished:
        part = played.advance()
        order += [] if part is None else part.prompts.row.tolist()
        if len(order) == 6:
            others_ended.set()
    assert sorted(order[:6]) == [1, 2, 3, 4, 5, 7]
    assert sorted(order[6:]) == [0, 6]


def test_slow_environments_are_truncated_and_a_slow_engine_truncates_none() -> None:
    class SlowEngine(Wrapped):
        def advance(self) -> Any:
            time.sleep(0.25)
            return self.inner.advance()

    class Slower(Slow):
        seconds = 1.2

    options: dict[str, Any] = {"sampling": sampling(max_new_tokens=60), "seed": 5}
    played = rollouts(Echo, SlowEngine(), max_seconds=0.5, max_turn_tokens=4)
    played.submit(prompts(4), **options)
    begin = time.monotonic()
    assert drained(played).terminated.all()
    assert time.monotonic() - begin > 0.5
    played = rollouts(Slower, engine(), max_seconds=1.0, max_turn_tokens=4)
    played.submit(prompts(8), **options)
    terminated = drained(played).terminated
    assert terminated.any()
    assert not terminated.all()
    assert played.generate(prompts(8), **options).terminated.tolist() == terminated.tolist()


def test_first_turns_of_a_group_are_submitted_together_and_read_once() -> None:
    class Counting(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = list[int]()

        def submit(self, batch: Any, **options: Any) -> None:
            self.sizes.append(len(batch))
            self.inner.submit(batch, **options)

    counting, starts = Counting(), list[int]()
    start = CausalDecoder.start

    def counted(self: Any, ids: Any, mask: Any, rows: Any) -> Any:
        starts.append(len(ids))
        return start(self, ids, mask, rows)

    played = rollouts(Echo, counting, max_turns=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalDecoder, "start", counted)
        played.submit(prompts(8, 4), sampling=sampling(), seed=1)
        drained(played)
    assert counting.sizes == [4, 4]
    assert sum(starts) == 2


def test_dropped_episodes_give_their_environments_back() -> None:
    made: list[Echo] = []
    gate = threading.Event()

    class Waiting(Echo):
        def step(self, response: Any) -> Any:
            gate.wait(60)
            return super().step(response)

    def make() -> Echo:
        made.append(Waiting())
        return made[-1]

    played = rollouts(make)
    for _ in range(2):
        played.submit(prompts(4), sampling=sampling(), seed=5)
        for _ in range(8):
            played.advance()
        played.cancel()
        gate.set()
        while sum(map(len, played._environments._idle.values())) < 4:  # the calls return
            time.sleep(0.001)
        gate.clear()
    assert len(made) == 4
    gate.set()
    played.submit(prompts(4), sampling=sampling(), seed=5)
    assert len(drained(played)) == 4
    assert len(made) == 4
