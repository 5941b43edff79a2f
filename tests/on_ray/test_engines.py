"""Engines in Ray actors: the numbers of engines in this process, through any death."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from kedge.ext.ray import engine as ray_engine
from kedge.ext.ray.actor import Actor, LostActorError, SharedArgument
from kedge.ext.ray.engine import HostedEngine, RayEngine, StoredWeights
from kedge.models.fingerprint import policy_weights
from kedge.records.errors import ConfigError, RolloutError
from kedge.records.types import Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.rollout.engines import ShardedEngine
from kedge.rollout.liveness import WorkerLimits
from kedge.testing import tiny_policy
from tests.contract.embedded import drained, gaps_of_run, kill_after_update, prompts
from tests.contract.engines import build_named
from tests.e2e.small import VOCAB, length_reward, rows, small
from tests.environments.test_new_contexts import record
from tests.environments.test_trainers import played
from tests.environments.toys import Echo
from tests.on_ray.clusters import local, needs_ray
from tests.unit.callback_runs import StopAt

pytestmark = needs_ray
ON_RAY = {"rollout_engine": "ray", "ray_engine": "embedded"}
QUICK = {"worker_heartbeat": 0.5, "worker_timeout": 5.0}
LONG = Sampling(max_new_tokens=100)
DEATHS = 4


@pytest.fixture(scope="module")
def pair():
    """Two engines in actors, as the options of a trainer make them."""
    local()
    made = small(**ON_RAY, vllm_num_engines=2, max_lag=1, **QUICK)
    yield made.engine.rollout_engine
    made.engine.rollout_engine.close()


@pytest.fixture
def llamas():
    """Two engines by hand, with random weights that are far apart."""
    local()
    made = engine_of()
    yield made
    made.close()


def numbers(trainer):
    """What a run logged, without times."""
    trainer.train()
    drop = ("time/", "eps", "tokens_per_second", "train_", "step_time")
    return [{k: v for k, v in row.items() if not k.startswith(drop)} for row in rows(trainer)]


def here(engines):
    """Engines in this process that share rows as those on Ray do."""
    model = tiny_policy("gpt_neox", vocab_size=VOCAB)
    made = [EmbeddedEngine(model, pad_id=0, shares_weights=False) for _ in range(engines)]
    return ShardedEngine(made, pad_id=0)


def test_engines_in_actors_sample_the_turns_of_environments():
    """Environments run in the learner's process, the engine in an actor."""
    local()
    run = {"environment": Echo, "max_lag": 1, "total_episodes": 12}
    found = [numbers(played(**run, **more)) for more in ({}, {**ON_RAY, **QUICK})]
    assert [row["environment/turns"] for row in found[0]] == [3.0] * 3
    for name in ("objective/scores", "environment/turns"):
        assert [row[name] for row in found[1]] == [row[name] for row in found[0]]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_has_the_numbers_of_one_without_ray(max_lag, pair):
    run = {"max_lag": max_lag, "total_episodes": 16}
    want = numbers(small(rollout_engine=here(2), **run))
    assert numbers(small(rollout_engine=pair, **run)) == want
    assert len(want) == 4
    assert want[-1]["objective/kl"] != 0
    embedded = numbers(small(**run))
    scores = [row["objective/scores"] for row in embedded]
    assert [row["objective/scores"] for row in want] == pytest.approx(scores, rel=1e-5)


def test_an_engine_that_dies_after_an_update_in_flight_samples_with_the_newest_weights(
    pair, monkeypatch
):
    """Its requests of older weights are sampled again; every token has the version it is of."""
    engine = pair.engines[0]
    restarts, pid = engine.actor.restarts, lambda: engine.actor.process.pid
    kill = lambda: os.kill(pid(), signal.SIGKILL)  # noqa: E731
    lost = kill_after_update(monkeypatch, engine, lambda: engine._in_flight, kill)
    made = small(
        rollout_engine=pair, stop_token=None, reward_model=None, reward_funcs=[length_reward],
        response_length=120, temperature=1.0, total_episodes=32, learning_rate=3e-2,
        rollout_schedule="as_completed", in_flight_weight_updates=True, max_lag=1,
    )  # fmt: skip
    models, trained = record(monkeypatch, made)
    made.train()
    assert engine.actor.restarts == restarts + 1
    assert lost
    assert [row["episode"] for row in rows(made)] == [4 * n for n in range(1, 9)]
    gap, swapped = gaps_of_run(models, trained)
    assert gap < 1e-5
    assert swapped > 0.1


def test_deaths_at_random_moments_change_no_number(pair):
    """Of engines at work, and of engines that are about to come back."""
    run = {"max_lag": 1, "total_episodes": 4000}
    actors = [each.actor for each in pair.engines]
    before = sum(actor.restarts for actor in actors)
    kills, steps, ended = [], [], threading.Event()
    killer = threading.Thread(target=strike, args=(actors, kills, steps, ended))

    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            steps.append(state.global_step)
            control.should_training_stop = len(kills) == DEATHS

    made = small(rollout_engine=pair, callbacks=[Enough()], **run)
    killer.start()
    try:
        got = numbers(made)
    finally:
        ended.set()
        killer.join()
    assert len(kills) == DEATHS
    restarts = sum(actor.restarts for actor in actors) - before
    assert restarts >= DEATHS - 3  # the last ones may go unnoticed
    calm = small(rollout_engine=here(2), callbacks=[StopAt(len(got))], **run)
    different = [
        (i, name, x, b.get(name))
        for i, (a, b) in enumerate(zip(got, numbers(calm), strict=True))
        for name, x in a.items()
        if b.get(name) != x
    ]
    assert different == []


def strike(actors, kills, steps, ended):
    """Kill one engine after another, and each twice more while it starts."""
    choose = random.Random(0)
    while len(kills) < DEATHS and not ended.wait(choose.uniform(0.05, 0.5)):
        victim, reached = choose.choice(actors), len(steps)
        rests = (0, choose.uniform(0, 1), choose.uniform(0, 1))
        for rest in rests[: DEATHS - len(kills)]:
            while victim.process.pid in kills and not ended.is_set():
                time.sleep(0.01)
            ended.wait(rest)
            kills.append(victim.process.pid)
            os.kill(victim.process.pid, signal.SIGKILL)
        while len(steps) < reached + 3 and not ended.is_set():  # it was not lost in vain
            time.sleep(0.01)


def engine_of(count=2, **limits):
    from kedge.config.ppo import PPOConfig

    asked = {**ON_RAY, **QUICK, "vllm_num_engines": count, **limits}
    args = PPOConfig(output_dir="unused", **asked)
    return build_named(args, tiny_policy("llama", initializer_range=0.3), pad_id=0)


def test_a_fault_in_the_middle_of_a_batch_changes_nothing(llamas):
    struck, other = (each.actor for each in llamas.engines)
    llamas.load_weights(dict(tiny_policy("llama", seed=1).named_parameters()), 5)
    batch = prompts(copies=100)
    want = llamas.generate(batch, sampling=LONG, seed=0)
    pids, wait = [other.process.pid], struck._wait
    for restarts, fault in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
        pids.append(struck.process.pid)

        def strike_once(call, limit, fault=fault):
            struck._wait = wait
            time.sleep(0.02)  # it samples
            os.kill(struck.process.pid, fault)
            return wait(call, limit)

        struck._wait = strike_once
        found = llamas.generate(batch, sampling=LONG, seed=0)
        assert (struck.restarts, other.restarts) == (restarts, 0)
        assert struck.process.pid not in pids
        assert other.process.pid == pids[0]
        assert torch.equal(found.ids, want.ids)
        assert torch.equal(found.behavior_logprobs, want.behavior_logprobs)
        assert found.policy_version.tolist() == [5] * 600
    llamas.close()
    assert not any(map(alive, (*pids, struck.process.pid)))


def alive(pid, seconds=60):
    """Whether a process is still there after a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


class Fragile(Actor):
    """An actor in this process, whose object is lost in the third call of ``serve``."""

    build = property(lambda self: self)

    def remote(self, kind, *args):
        return kind(*args)

    def _start(self):
        self.handle, self.served = self._build(self), 0

    def once(self, method, *args, within=None, **named):
        self.served += method == "serve"
        if self.handle is None or (self.served == 3 and not self.restarts):
            raise LostActorError("engine 0 is gone")
        return getattr(self.handle, method)(*args, **named)


def test_requests_of_a_lost_actor_are_sampled_again_but_not_in_the_same_call(monkeypatch):
    """Meanwhile its weights may have become too old: the scheduler loads newer ones first."""
    for name in ("ray.put", "ray.get", "ray.kill"):
        monkeypatch.setattr(name, lambda x: x)
    monkeypatch.setattr("kedge.ext.ray.actor.ControlStore", lambda patience: None)
    monkeypatch.setattr(ray_engine, "Actor", Fragile)
    monkeypatch.setattr(ray_engine, "_SECONDS", 0.0)
    model, batch = tiny_policy("llama", initializer_range=0.3), prompts(copies=2)
    stored = StoredWeights.put(policy_weights(model).items())
    shared = SharedArgument(lambda: model, 1)
    about = {"options": {}, "limits": WorkerLimits()}
    engine = RayEngine("engine 0", HostedEngine, shared, stored, {"pad_id": 0}, **about)
    engine.submit(batch, sampling=LONG, seed=0)
    assert [engine.advance() for _ in range(3)] == [None] * 3
    assert (engine.actor.restarts, engine.actor.served) == (1, 0)
    want = EmbeddedEngine(model, pad_id=0).generate(batch, sampling=LONG, seed=0)
    assert torch.equal(drained(engine).ids, want.ids)


def test_an_engine_that_is_slow_to_come_back_never_samples_with_its_first_weights():
    local()
    engine = engine_of(1)
    actor = engine.engines[0].actor
    engine.load_weights(dict(tiny_policy("llama", seed=1).named_parameters()), 5)
    want = engine.generate(prompts(), sampling=LONG, seed=0)
    revive, lost = actor._revive, []

    def late(mine):
        if not lost:
            lost.append(mine.process.pid)
            raise LostActorError("no sign of life")  # though it lives
        revive(mine)

    actor._revive = late
    os.kill(actor.process.pid, signal.SIGKILL)
    found = engine.generate(prompts(), sampling=LONG, seed=0)
    assert actor.restarts == 2
    assert torch.equal(found.ids, want.ids)
    assert not alive(lost[0])
    engine.close()


def test_an_engine_that_dies_again_and_again_or_takes_too_long_ends_the_run(monkeypatch):
    monkeypatch.setattr("kedge.ext.ray.actor._MAX_RESTARTS", 0)
    engine = engine_of(1)
    actor = engine.engines[0].actor
    monkeypatch.setattr(actor, "_limits", replace(actor._limits, call=0.01))
    too_long = (
        r"engine 0 was lost 1 times in a row: engine 0 \(process .*\) took longer than 0.01 s"
    )
    with pytest.raises(RolloutError, match=too_long):
        engine.generate(prompts(copies=50), sampling=LONG, seed=0)
    monkeypatch.undo()
    monkeypatch.setattr("kedge.ext.ray.actor._MAX_RESTARTS", 1)
    start = actor._start

    def start_and_die():
        start()
        os.kill(actor.process.pid, signal.SIGKILL)

    actor._start = start_and_die
    os.kill(actor.process.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"engine 0 was lost 2 times in a row"):
        engine.generate(prompts(), sampling=LONG, seed=0)
    engine.close()


def test_no_room_is_one_clear_error_in_bounded_time():
    local()
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        engine_of(99, ray_wait_seconds=1.0)
    assert time.monotonic() - begin < 60
    said = str(caught.value)
    assert "could not place within 1 s (ray_wait_seconds)" in said
    assert "CPU: 99 requested, 8 in the cluster" in said
    assert "<- missing" in said
