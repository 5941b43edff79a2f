"""A server of our own under faults: no row is lost or sampled twice, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from kedge.ext.vllm import server
from kedge.ext.vllm.requests import build_requests
from kedge.ext.vllm.server import Server
from kedge.records.errors import ConfigError
from kedge.records.types import Sampling
from tests.contract.embedded import gaps_of_run, kill_after_update, prompts
from tests.contract.engines import needs_vllm, policy, server_of, trained
from tests.e2e.small import length_reward, small
from tests.environments.test_new_contexts import record

pytestmark = [*needs_vllm, pytest.mark.slow]
LONG = Sampling(max_new_tokens=100)


def group(pid):
    """The processes of a process group."""
    return [process for process in psutil.process_iter() if belongs(process, pid)]


def belongs(process, pid):
    try:
        return os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def kill_all(pid):
    os.killpg(pid, signal.SIGKILL)


def cores(pid):
    return [p for p in group(pid) if "EngineCore" in " ".join(p.cmdline())]


def kill_the_core(pid):
    for process in cores(pid):
        process.kill()


def hang(pid):
    os.killpg(pid, signal.SIGSTOP)


# Requests that are given up leave sockets of httpx to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", [kill_all, hang])
def test_a_fault_in_the_middle_of_a_batch_changes_nothing(fault):
    engine = server_of()
    service = engine.service
    engine.load_weights(trained(policy()), 5)
    batch = prompts(copies=20)
    want = engine.generate(batch, sampling=LONG, seed=0)
    restarts, struck = service.restarts, service.process.pid
    timer = threading.Timer(0.3, fault, [struck])
    timer.start()
    begin = time.monotonic()
    found = engine.generate(batch, sampling=LONG, seed=0)
    timer.join()
    assert service.restarts == restarts + 1
    assert torch.equal(found.ids, want.ids)
    assert found.policy_version.tolist() == [5] * 120
    assert time.monotonic() - begin < 300
    assert group(struck) == []


def test_a_server_that_dies_after_an_update_in_flight_samples_with_the_newest_weights(monkeypatch):
    """Its requests of older weights are sampled again; every token has the version it is of."""
    engine = server_of()
    service, restarts = engine.service, engine.service.restarts
    kill = lambda: kill_the_core(service.process.pid)  # noqa: E731
    lost = kill_after_update(monkeypatch, engine, lambda: service._in_flight, kill)
    made = small(
        rollout_engine=engine, model=policy(max_positions=1024), reward_model=None, stop_token=None,
        reward_funcs=[length_reward], response_length=400, total_episodes=16, temperature=1.0,
        rollout_schedule="as_completed", in_flight_weight_updates=True, max_lag=1, num_ppo_epochs=1,
    )  # fmt: skip
    models, trained = record(monkeypatch, made)
    made.train()
    assert service.restarts == restarts + 1
    assert lost
    gap, swapped = gaps_of_run(models, trained)
    assert gap < 1e-4
    assert swapped > 0.1


def test_others_who_use_a_server_get_each_answer_from_one_version(monkeypatch):
    engine = server_of()
    service = engine.service
    engine.load_weights(trained(policy()), 6)
    other, spans, read = Server("http://vllm", uds=service.uds), [], server._result

    def noting(body, *about):
        spans.append([span["version"] for span in body["choices"][0]["weight_versions"]])
        return read(body, *about)

    def ask(copies):
        requests = build_requests(prompts(copies=copies), LONG, 0, vocabulary=64)
        new, count = dict(enumerate(requests)), 0
        while count < len(requests):
            count, new = count + len(other.serve(new)), {}

    monkeypatch.setattr(server, "_result", noting)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, 60)
        until = time.monotonic() + 60
        while not spans and time.monotonic() < until:  # some are answered, others are not
            time.sleep(0.01)
        moved = {n: x + 0.05 * torch.randn_like(x) for n, x in trained(policy()).items()}
        assert not asked.done()
        engine.load_weights(moved, 7)
        asked.result()
    assert {tuple(each) for each in spans} <= {("6",), ("7",)}
    assert spans[0] == ["6"]
    spans.clear()
    ask(1)
    assert spans == [["7"]] * 6
    other.close()


def test_a_server_of_another_set_up_is_refused():
    started = server_of().service
    started.check(tied=False, precision="float32")
    with pytest.raises(ConfigError, match=r"--dtype bfloat16 --hf-overrides"):
        started.check(tied=True, precision="bfloat16")


def test_nothing_is_left_of_a_server_whose_owner_is_killed(tmp_path):
    code = """
        import sys, time
        from pathlib import Path
        from kedge.ext.vllm.server import Process
        sleep = ["bash", "-c", "sleep 1000 & sleep 1000"]
        process = Process(sleep, log=Path(sys.argv[1]), eager=True)
        process.start()
        print(process.pid, flush=True)
        time.sleep(1000)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "log")], stdout=subprocess.PIPE
    )
    pid = int(owner.stdout.readline())
    until = time.monotonic() + 30
    while len(group(pid)) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    while group(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert group(pid) == []
