"""Engines in Ray actors: the numbers of engines in this process, through any death."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch
from transformers import TrainerCallback

from kedge.backends.engines import SplitEngine
from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.backends.ray.actor import LostError
from kedge.errors import ConfigError, RolloutError
from kedge.testing import tiny_policy
from kedge.types import Sampling
from tests.contract.test_rollout_engine import prompts
from tests.e2e.small import VOCAB, rows, small
from tests.on_ray.clusters import local, needs_ray

pytestmark = needs_ray
ON_RAY = {"rollout_engine": "ray", "ray_engine": "embedded"}
QUICK = {"vllm_heartbeat": 0.5, "vllm_patience": 5.0}
LONG = Sampling(max_new_tokens=100)


@pytest.fixture(autouse=True, scope="module")
def cluster():
    local()


@pytest.fixture
def close():
    made = []
    yield made.append
    for each in made:
        each.engine.rollouts.close()


def numbers(trainer):
    """What a run logged, without times."""
    trainer.train()
    drop = ("time/", "eps", "tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(drop)} for row in rows(trainer)]


def here(engines):
    """Engines in this process that share rows as those on Ray do."""
    model = tiny_policy("gpt_neox", vocab_size=VOCAB)
    made = [EmbeddedEngine(model, pad_id=0, live=False) for _ in range(engines)]
    return SplitEngine(made, pad_id=0)


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("engines", [1, 2])
def test_a_run_has_the_numbers_of_one_without_ray(engines, max_lag, close):
    run = {"max_lag": max_lag, "total_episodes": 16}
    want = numbers(small(rollout_engine=here(engines), **run))
    made = small(**ON_RAY, vllm_num_engines=engines, **run)
    close(made)
    assert numbers(made) == want
    assert len(want) == 4
    assert want[-1]["objective/kl"] != 0
    embedded = numbers(small(**run))
    scores = [row["objective/scores"] for row in embedded]
    assert [row["objective/scores"] for row in want] == pytest.approx(scores, rel=1e-5)


def test_engines_on_ray_are_lanes_of_their_own(close):
    run = {"max_lag": 1, "total_episodes": 16, "rollout_schedule": "as_completed"}
    made = small(**ON_RAY, vllm_num_engines=2, **run)
    close(made)
    found = numbers(made)
    assert len(found) == 4
    assert all(row["rollout/lag"] <= 1 for row in found)
    assert len(made.engine.rollouts.lanes) == 2


def engine_of(count=2, **limits):
    from kedge.backends.ray.build import ray_engines
    from kedge.config.ppo import PPOConfig
    from kedge.config.rollout import rollout_options

    asked = {**ON_RAY, **QUICK, "vllm_num_engines": count, **limits}
    options = rollout_options(PPOConfig(output_dir="unused", **asked))
    return ray_engines(tiny_policy("llama", initializer_range=0.3), options, pad_id=0)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fault_in_the_middle_of_a_batch_changes_nothing(fault):
    engine = engine_of()
    struck, other = (each.actor for each in engine.engines)
    engine.load_weights(dict(tiny_policy("llama", seed=1).named_parameters()), 5)
    batch = prompts(copies=100)
    begin = time.monotonic()
    want = engine.generate(batch, sampling=LONG, seed=0)
    took = time.monotonic() - begin
    pids = [struck.pid, other.pid]
    timer = threading.Timer(took / 2, os.kill, [struck.pid, fault])
    timer.start()
    found = engine.generate(batch, sampling=LONG, seed=0)
    timer.join()
    assert (struck.restarts, other.restarts) == (1, 0)
    assert struck.pid != pids[0]
    assert other.pid == pids[1]
    assert torch.equal(found.ids, want.ids)
    assert torch.equal(found.behavior_logprobs, want.behavior_logprobs)
    assert found.version.tolist() == [5] * 600
    engine.close()
    assert not any(map(alive, (*pids, struck.pid)))


def alive(pid, seconds=10):
    """Whether a process is still there after a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def test_an_engine_that_is_slow_to_come_back_never_samples_with_its_first_weights():
    engine = engine_of(1)
    actor = engine.engines[0].actor
    engine.load_weights(dict(tiny_policy("llama", seed=1).named_parameters()), 5)
    want = engine.generate(prompts(), sampling=LONG, seed=0)
    revive, lost = actor._revive, []

    def late(mine):
        if not lost:
            lost.append(mine.pid)
            raise LostError("no sign of life")  # though it lives
        revive(mine)

    actor._revive = late
    os.kill(actor.pid, signal.SIGKILL)
    found = engine.generate(prompts(), sampling=LONG, seed=0)
    assert actor.restarts == 2
    assert torch.equal(found.ids, want.ids)
    assert not alive(lost[0])
    engine.close()


def test_an_engine_that_dies_again_and_again_ends_the_run(monkeypatch):
    monkeypatch.setattr("kedge.backends.ray.actor._IN_A_ROW", 1)
    engine = engine_of(1)
    actor = engine.engines[0].actor
    start = actor._start

    def start_and_die():
        start()
        os.kill(actor.pid, signal.SIGKILL)

    actor._start = start_and_die
    os.kill(actor.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"engine 0 was lost 2 times in a row"):
        engine.generate(prompts(), sampling=LONG, seed=0)
    engine.close()


def test_an_engine_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr("kedge.backends.ray.actor._IN_A_ROW", 0)
    engine = engine_of(1, rollout_timeout=0.01)
    with pytest.raises(
        RolloutError, match=r"engine 0 was lost 1 times in a row: engine 0 took longer than 0.01 s"
    ):
        engine.generate(prompts(copies=50), sampling=LONG, seed=0)
    engine.close()


def test_no_room_is_one_clear_error_in_bounded_time():
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        engine_of(99, ray_wait_seconds=1.0)
    assert time.monotonic() - begin < 10
    said = str(caught.value)
    assert "no room within 1 s (ray_wait_seconds)" in said
    assert "CPU: 99 asked for, 8 in the cluster" in said
    assert "<- missing" in said


def test_twenty_deaths_at_random_moments_change_no_number(close):
    run = {"max_lag": 1, "total_episodes": 4000, "vllm_num_engines": 2} | QUICK
    made = small(**ON_RAY, **run)
    close(made)
    actors = [each.actor for each in made.engine.rollouts.engines]
    kills, ended = [], threading.Event()
    choose = random.Random(0)

    def strike():
        while len(kills) < 20 and not ended.wait(choose.uniform(0.05, 0.5)):
            victim = choose.choice(actors)
            if victim.up and victim.pid not in kills:
                kills.append(victim.pid)
                os.kill(victim.pid, signal.SIGKILL)

    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = len(kills) == 20

    made.add_callback(Enough())
    killer = threading.Thread(target=strike)
    killer.start()
    try:
        got = numbers(made)
    finally:
        ended.set()
        killer.join()
    assert len(kills) == 20
    assert sum(actor.restarts for actor in actors) >= 18  # the last ones may go unnoticed
    calm = small(rollout_engine=here(2), **{k: v for k, v in run.items() if "vllm" not in k})
    calm.add_callback(StopAt(len(got)))
    calm = numbers(calm)
    different = [
        (i, name, x, b.get(name))
        for i, (a, b) in enumerate(zip(got, calm, strict=True))
        for name, x in a.items()
        if b.get(name) != x
    ]
    assert different == []


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.step
