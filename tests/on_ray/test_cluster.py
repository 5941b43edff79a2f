"""Connecting to a cluster, and what is said where that fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.on_ray.clusters import needs_ray

pytestmark = needs_ray

HEAD = """
import sys, ray
ray.init(address="local", num_cpus=1, include_dashboard=False, configure_logging=False,
         log_to_driver=False)
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
CLIENT = """
import sys
from kedge.ext.ray.cluster import connect
from kedge.records.errors import ConfigError
try:
    print("connected", connect(sys.argv[1]))
except ConfigError as error:
    print(error)
"""


def test_a_cluster_with_token_authentication_says_what_to_set() -> None:
    """Ray 2.60 turns it on by default, and never for a client with an explicit address."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_A")}
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"RAY_AUTH_MODE": "token"},
    )
    assert head.stdin is not None
    assert head.stdout is not None
    try:
        address = next(x for x in head.stdout if x.startswith("address")).split()[1]
        said = {}
        for mode in ("", "token"):
            extra = {"RAY_AUTH_MODE": mode} if mode else {}
            said[mode] = subprocess.run(
                [sys.executable, "-c", CLIENT, address],
                capture_output=True,
                text=True,
                env=environment | extra,
                timeout=120,
                check=False,
            ).stdout
    finally:
        head.stdin.close()
        head.wait(60)
        head.stdout.close()
    assert "set RAY_AUTH_MODE=token on every machine" in said[""]
    assert "RAY_AUTH_MODE is unset here" in said[""]
    assert said["token"].startswith("connected True")


def test_an_address_without_a_cluster_is_said_to_have_none() -> None:
    from kedge.ext.ray.cluster import _why_not, responds

    assert not responds("127.0.0.1:1")
    assert not responds("auto")
    assert _why_not("127.0.0.1:1", ConnectionError("x")).startswith("no Ray cluster responds at")


@pytest.fixture
def started():
    """A local cluster in a session of its own, if this process has none."""
    import ray

    from kedge.ext.ray import cluster

    ray.shutdown()
    cluster.connect(cpus=1)
    yield cluster
    cluster.leave()


def test_processes_of_ray_do_not_get_the_signals_of_this_process_group(started) -> None:
    import psutil

    children = psutil.Process().children()
    ray = [c for c in children if any("gcs_server" in x or "raylet" in x for x in c.cmdline())]
    assert len(ray) >= 2
    assert all(os.getpgid(c.pid) != os.getpgid(0) for c in ray)
    assert {c.pid for c in ray} <= {*started._SESSIONS}


def test_a_control_store_that_is_gone_is_noticed_and_nothing_is_left(started) -> None:
    import time

    import psutil

    store = started.ControlStore(1.0)
    assert not store.lost()
    everything = psutil.Process().children(recursive=True)
    (server,) = (c for c in everything if any("gcs_server" in x for x in c.cmdline()))
    server.kill()
    begin = time.monotonic()
    while not store.lost():
        assert time.monotonic() - begin < 60
        time.sleep(0.1)
    started.leave()
    _, alive = psutil.wait_procs(everything, timeout=60)
    assert alive == []
