"""Processes that do not respond, and what counts as their silence."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from kedge.ray import cluster
from kedge.ray.actor import Actor, LostActorError
from kedge.ray.cluster import cause
from kedge.ray.context import ActorProcess
from kedge.rollout import liveness
from kedge.rollout.liveness import WorkerLimits, reporting_silence


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
