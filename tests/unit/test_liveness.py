"""Processes that do not respond: stopped ones are found in seconds, busy ones are left alone."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from kedge.ray import cluster, stop_probe
from kedge.ray.actor import Actor, ActorLimits, LostActorError
from kedge.ray.cluster import cause
from kedge.ray.stop_probe import ActorProcess, StopProbe
from kedge.rollout import liveness
from kedge.rollout.liveness import HungCheck, is_stopped, reporting_silence, watch_group

BUSY = "while True: pass"
LEADER = (  # prints the process id of its child, and ends with its standard input
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
    "print(child.pid, flush=True); sys.stdin.read()"
)


def group(child: str = "import time; time.sleep(60)"):
    """A process group with one child, whose process id is the second result."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, child],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    return leader, int(leader.stdout.readline())


def end(leader):
    """Kill what is left of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    for pipe in (leader.stdin, leader.stdout):
        pipe.close()


def test_a_stopped_process_is_told_from_a_busy_one_and_from_none():
    leader, child = group(BUSY)
    try:
        assert not is_stopped(child)
        os.kill(child, signal.SIGSTOP)
        until = time.monotonic() + 60
        while not is_stopped(child) and time.monotonic() < until:
            time.sleep(0.01)
        assert is_stopped(child)
    finally:
        end(leader)
    assert not is_stopped(leader.pid)


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


def test_a_busy_process_has_the_whole_patience_and_a_stopped_one_seconds(caplog, clock):
    busy = HungCheck("engine 0", 60.0, lambda: False)
    assert set(clock(60, busy.reason)) == {None}
    (warning,) = caplog.messages
    assert warning.startswith("engine 0 has not responded for 8 s; it may be busy")
    assert "after 60 s without a response (worker_timeout)" in warning
    assert clock(0.5, busy.reason) == ["did not respond for 60 s (worker_timeout)"]
    stopped = HungCheck("engine 0", 60.0, lambda: True)
    assert set(clock(2, stopped.reason)) == {None}  # it has not been looked at
    assert clock(0.5, stopped.reason) == ["was stopped by a signal (SIGSTOP)"]


@pytest.mark.parametrize("silent", [0.5, 1.5, 55.0])
def test_a_job_that_was_suspended_as_a_whole_loses_no_process(silent, clock, monkeypatch):
    """As by ``scontrol suspend``; the other process continues a second later than this one."""
    monkeypatch.setattr(stop_probe, "is_stopped", lambda _: others_stopped)
    others_stopped = False
    probe = StopProbe(ActorProcess(pid=1, address="", node=""))
    check = HungCheck("engine 0", 60.0, probe._stopped_here)
    clock(silent, check.reason)
    others_stopped = True  # just before this process
    assert check.reason() is None
    assert clock(3600, check.reason, every=3600) == [None]
    assert clock(0.5, check.reason) == [None]
    others_stopped = False
    assert set(clock(1.5, check.reason)) == {None}  # before it responds
    others_stopped = True
    assert "was stopped by a signal (SIGSTOP)" in clock(4, check.reason)


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
def test_only_running_time_counts_towards_the_limit_of_a_call(suspended, limit, clock):
    steps, pings = [], []
    called = Actor.__new__(Actor)
    called.name, called.process, called._limits = "engine 0", ActorProcess(0, "", ""), ActorLimits()
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


def test_a_server_with_a_stopped_process_is_killed(caplog):
    leader, child = group()
    try:
        os.kill(child, signal.SIGSTOP)
        watch_group(leader, every=0.1)
        assert f"its process {child} was stopped" in caplog.text
        assert leader.wait(60) == -signal.SIGKILL
    finally:
        end(leader)


@pytest.mark.parametrize("guard_is_killed", [True, False])
def test_the_loss_of_the_guard_is_reported_and_the_end_of_a_server_is_not(guard_is_killed, caplog):
    caplog.set_level(logging.WARNING)
    leader, child = group()
    try:
        if guard_is_killed:
            leader.kill()
        else:
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        watch_group(leader, every=0.1)
        assert (f"kill {child}" in caplog.text) is guard_is_killed
    finally:
        end(leader)


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
