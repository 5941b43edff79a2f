"""Who sits where on a cluster, what is said of it, and whose silence is noticed: no Ray needed."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kedge.ext.ray import cluster
from kedge.ext.ray.actor import Actor, LostActorError
from kedge.ext.ray.cluster import ActorProcess, cause
from kedge.ext.ray.launch import Failure, failure
from kedge.ext.ray.placement import plan_bundles, reserve
from kedge.records.errors import ConfigError, LostNodeError, SyncError
from kedge.records.types import PromptBatch, Receipt, Sampling, with_unique_groups
from kedge.rollout import liveness
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.rollout.engines import ShardedEngine, slice_rollout, start_all
from kedge.rollout.liveness import WorkerLimits, reporting_silence
from kedge.testing import tiny_policy
from tests.contract.embedded import prompts

SAMPLING = Sampling(max_new_tokens=12, stop_ids=(5, 6, 7, 8))


def embedded(**options):
    model = tiny_policy("llama", initializer_range=0.3)
    return EmbeddedEngine(model, pad_id=0, shares_weights=False, **options)


class TestPlan:
    def test_two_nodes_of_learners_and_engines_on_gpus(self):
        plan = plan_bundles(
            learners=[4, 2], engines=2, gpus=True, gpus_per_engine=2, workers={"reward": (1, 0)}
        )
        assert [dict(b) for b in plan.bundles] == [
            {"CPU": 4, "GPU": 4},
            {"CPU": 2, "GPU": 2},
            {"CPU": 1, "GPU": 2},
            {"CPU": 1, "GPU": 2},
            {"CPU": 1},
        ]
        assert plan.strategy == "SPREAD"
        assert plan.total == {"CPU": 9, "GPU": 10}
        assert [(s.index, s.bundle, s.gpus) for s in plan.of("learner")] == [
            *((i, 0, 1) for i in range(4)),
            *((i, 1, 1) for i in (4, 5)),
        ]
        assert [(s.bundle, s.gpus) for s in plan.of("engine")] == [(2, 2), (3, 2)]

    def test_workers_beside_the_learners(self):
        plan = plan_bundles(
            learners=[1], gpus=True, workers={"reward": (1, 0), "reference": (2, 0.25)}
        )
        assert plan.text().splitlines()[1:] == [
            "  bundle 1: CPU 1  reward 0",
            "  bundle 2: CPU 1, GPU 0.25  reference 0",
            "  bundle 3: CPU 1, GPU 0.25  reference 1",
        ]

    def test_a_rank_takes_its_own_seats_of_a_launch(self, monkeypatch):
        plan = plan_bundles(learners=[2], engines=2, workers={"reference": (4, 0)})

        def slots(rank, role, **count):
            at = SimpleNamespace(rank=rank, world_size=2, placement=plan)
            monkeypatch.setattr("kedge.ext.ray.placement.launch_context", lambda: at)
            return [slot.index for slot in reserve(role, SimpleNamespace(**count)).slots]

        ranks = (0, 1)
        assert [slots(x, "reference", ray_ref_workers=2) for x in ranks] == [[0, 1], [2, 3]]
        assert [slots(x, "engine", vllm_num_engines=2) for x in ranks] == [[0, 1], [0, 1]]
        with pytest.raises(
            ConfigError, match=r"ray_ref_workers=3 needs 6 reference actors .* reserved 4"
        ):
            slots(0, "reference", ray_ref_workers=3)

    @pytest.mark.parametrize("engines", [1, 2, 3, 7])
    def test_one_gpu_is_shared_by_learner_and_engines(self, engines):
        plan = plan_bundles(learners=[1], engines=engines, gpus=True, single_gpu_mode=True)
        (bundle,) = plan.bundles
        assert 0.999 < bundle["GPU"] <= 1.0
        assert sum(slot.gpus for slot in plan.slots) == pytest.approx(bundle["GPU"])
        assert plan.of("learner")[0].gpus == 0.5

    def test_one_gpu_is_not_for_several_learners(self):
        with pytest.raises(ConfigError, match="got 2 learners and 1 GPUs per engine"):
            plan_bundles(learners=[2], engines=1, gpus=True, single_gpu_mode=True)


class TestRoot:
    def test_errors_come_before_deaths_and_deaths_before_what_follows(self):
        echo = Failure(rank=0, when=1.0, text="RuntimeError: Connection closed by peer")
        death = Failure(rank=1, when=2.0, text="process 1 is gone", died=True)
        error = Failure(rank=2, when=3.0, text="ValueError: no")
        assert sorted([echo, death, error], key=lambda f: f.order) == [error, death, echo]

    def test_an_error_that_cannot_be_sent_is_told_as_text(self):
        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")

        try:
            raise Odd(1, 2)
        except Odd as error:
            told = failure(3, error)
        assert told.error is None
        assert told.text == "Odd: 1 and 2"
        assert "raise Odd(1, 2)" in told.trace


class TestRows:
    @pytest.mark.parametrize("spare", [False, True])
    @pytest.mark.parametrize("parts", [1, 2, 4, 9])
    @pytest.mark.parametrize("top_p", [1.0, 0.7])
    def test_a_batch_in_shares_is_the_batch(self, parts, spare, top_p):
        engine, sampling = embedded(extra_column=spare), replace(SAMPLING, top_p=top_p)
        batch = prompts(copies=2)
        want = engine.generate(batch, sampling=sampling, seed=1)
        split = ShardedEngine([engine] * parts, pad_id=0)
        found = split.generate(batch, sampling=sampling, seed=1)
        assert found.prompts is batch
        for name in ("ids", "loss_mask", "response_mask", "terminated", "policy_version"):
            assert torch.equal(getattr(found, name), getattr(want, name))
        if (allowed := want.allowed_tokens) is not None:
            width = min(found.allowed_tokens.shape[-1], allowed.shape[-1])
            assert torch.equal(found.allowed_tokens[..., :width], allowed[..., :width])
        assert torch.allclose(found.behavior_logprobs, want.behavior_logprobs, atol=1e-6)

    def test_ranks_get_what_they_would_have_sampled_alone(self):
        engine, batch = embedded(extra_column=True), prompts(copies=2)
        parts = []
        for rows in torch.arange(len(batch)).tensor_split(3):
            p = batch.rows(rows)
            n = int(p.mask.any(0).nonzero().min())  # as wide as this rank's longest prompt
            group = p.group - p.group.min()  # ranks count from 0
            parts.append(PromptBatch(ids=p.ids[:, n:], mask=p.mask[:, n:], group=group, row=p.row))
        whole = engine.generate(
            PromptBatch.cat(with_unique_groups(parts)), sampling=SAMPLING, seed=2
        )
        start = 0
        for part in parts:
            want = engine.generate(part, sampling=SAMPLING, seed=2)
            got = slice_rollout(whole, slice(start, start + len(part)), part, extra=1)
            start += len(part)
            assert torch.equal(got.ids, want.ids)
            assert torch.equal(got.response_mask, want.response_mask)


class TestSplit:
    def test_engines_that_hold_different_weights_are_an_error(self):
        one, two = embedded(), embedded()
        two.load_weights = lambda weights, version: Receipt(version=version, fingerprint="other")
        with pytest.raises(SyncError, match="engine 1 of 2 reports"):
            ShardedEngine([one, two], pad_id=0).load_weights(
                dict(tiny_policy("llama").named_parameters()), 1
            )

    def test_the_rows_of_an_engine_whose_node_is_lost_are_sampled_by_the_others(self, caplog):
        batch, weights = prompts(copies=2), dict(tiny_policy("llama").named_parameters())
        want = ShardedEngine([embedded()], pad_id=0).generate(batch, sampling=SAMPLING, seed=1)
        engines = [embedded() for _ in range(3)]
        split = ShardedEngine(engines, pad_id=0)

        def lost(*args, **named):
            raise LostNodeError("engine 1 cannot be restarted: its node is lost")

        engines[1].generate = lost
        found = split.generate(batch, sampling=SAMPLING, seed=1)
        assert torch.equal(found.ids, want.ids)
        assert torch.allclose(found.behavior_logprobs, want.behavior_logprobs, atol=1e-6)
        assert split.engines == [engines[0], engines[2]]
        assert "its node is lost; continuing with 2 engines" in caplog.text
        engines[2].load_weights = lost
        assert split.load_weights(weights, 1).version == 1
        assert split.engines == [engines[0]]
        engines[0].generate = lost
        with pytest.raises(LostNodeError):
            split.generate(batch, sampling=SAMPLING, seed=1)

    def test_nothing_is_left_when_one_of_several_does_not_start(self):
        closed = []

        class Thing:
            def close(self):
                closed.append(self)

        def fail():
            raise ConfigError("no")

        with pytest.raises(ConfigError, match="no"):
            start_all([Thing, fail, Thing], undo=lambda: closed.append("room"))
        assert len(closed) == 3
        assert closed[-1] == "room"


def test_engines_that_are_collected_release_their_resources_in_another_thread():
    released, engine = queue.Queue(), embedded()

    def release():
        released.put(threading.get_ident())

    ShardedEngine([engine], pad_id=0, on_close=release)
    gc.collect()
    assert released.get(timeout=10) != threading.get_ident()
    engines = ShardedEngine([engine], pad_id=0, on_close=release)
    engines.close()
    engines.close()
    del engines
    gc.collect()
    assert released.get(timeout=10) == threading.get_ident()
    assert released.empty()


def test_a_line_says_what_is_waited_for_while_engines_start(monkeypatch, caplog):
    monkeypatch.setattr(liveness, "START_EVERY", 0.1)
    with liveness.starting("engine 0 imports"), liveness.starting("engine 1 waits"):
        time.sleep(0.35)
    assert caplog.messages[0] == "starting: engine 0 imports (0 s); engine 1 waits (0 s)"
    assert 2 <= len(caplog.messages) <= 3
    time.sleep(0.3)
    assert len(caplog.messages) <= 3


@pytest.fixture
def clock(monkeypatch):
    """Sets the time that ``kedge.rollout.liveness`` reads, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])

    def advance(seconds, check=lambda: None, every=0.5):
        """The results of calls while time passes."""
        results = []
        for _ in range(round(seconds / every)):
            now[0] += every
            results.append(check())
        return results

    return advance


@pytest.fixture
def engine():
    """An actor without a process."""
    actor = Actor.__new__(Actor)
    actor.name, actor.process, actor._limits = "engine 0", ActorProcess(0, "", ""), WorkerLimits()
    return actor


def test_a_silent_process_has_the_whole_patience_while_this_one_runs(caplog, clock, engine):
    """Not counted: a time in which all processes are suspended, as by ``scontrol suspend``."""
    seconds = []

    def ready(refs, wait):
        seconds.extend(clock(wait, lambda: wait, every=wait))
        if sum(seconds) == 55:
            clock(3600, every=3600)
        return False

    engine._ready, engine._ping = ready, lambda: "ping"
    hung = r"^engine 0 did not respond for 60 s \(worker_timeout\)"
    with pytest.raises(LostActorError, match=hung):
        engine._check_health("call", liveness.RunningTime())
    assert sum(seconds) == 61.0  # half a second passed with the suspension
    (warning,) = caplog.messages
    assert warning.startswith("engine 0 has not responded for 8 s; it may be busy")
    assert "after 60 s without a response (worker_timeout)" in warning


def test_a_suspended_job_does_not_lose_the_control_store(clock, monkeypatch):
    """The store is suspended before this process, and continues after it."""
    responds = True
    monkeypatch.setattr(cluster, "responds", lambda *_: responds)
    context = SimpleNamespace(gcs_address="here:1")
    ray = SimpleNamespace(get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    store = cluster.ControlStore(10.0)
    assert set(clock(3, store.lost)) == {False}
    responds = False
    assert set(clock(1.5, store.lost)) == {False}
    assert clock(3600, store.lost, every=3600) == [False]
    assert set(clock(8, store.lost)) == {False}
    assert clock(3, store.lost)[-1]


@pytest.mark.parametrize(("suspended", "limit"), [(4 * 3600, 20.0), (0, 5.0)])
def test_only_running_time_counts_towards_the_limit_of_a_call(suspended, limit, clock, engine):
    steps, pings, called = [], [], engine
    called._check_cluster = lambda: None
    called._check_health = lambda call, running: pings.append(len(steps))
    called._get = lambda call: "result"

    def ready(refs, seconds):
        steps.extend(clock(seconds, every=seconds))
        if len(steps) == 3:
            clock(suspended, every=suspended or 1)
        return len(steps) == 13

    called._ready = ready
    if suspended:
        assert called._wait("call", limit) == "result"
        assert pings == [6, 11]  # every heartbeat
    else:
        with pytest.raises(LostActorError, match="took longer than 5 s"):
            called._wait("call", limit)
        assert len(steps) == 5


@pytest.mark.parametrize("long", [True, False])
def test_only_a_long_silence_is_reported(long, caplog, monkeypatch):
    monkeypatch.setattr(liveness, "WARN_AFTER", 0.1 if long else 30.0)
    with reporting_silence("the vLLM server", 60.0):
        until = time.monotonic() + 60
        while long and not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
    assert len(caplog.records) == long


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (
            "4 worker(s) were killed due to the node running low on memory. Memory on the node ("
            "IP: 10.0.0.1, ID: 55a0) was 22.67GB used / 23.54GB limit (0.96); top users ...",
            "Ray killed it because its node was low on memory (22.67GB used / 23.54GB);",
        ),
        ("The actor is dead because its node has died. Node Id: 55a0 ...", "its node was lost"),
        ("Worker exit type: SYSTEM_ERROR Worker exit detail: ...", "it was killed (perhaps out of"),
        ("The actor 61cb is unavailable: ...", "it or its node was lost"),
        ("x. The actor is dead because Y. Some common causes ...", "The actor is dead because Y"),
    ],
)
def test_why_ray_lost_an_actor_is_one_clause(text, meaning):
    assert cause(RuntimeError(text)).startswith(meaning)
