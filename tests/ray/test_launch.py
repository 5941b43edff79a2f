"""Learners on Ray: the numbers of learners without it, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from kedge.backends.ray import Limits, launch
from kedge.errors import ConfigError, LaunchError
from tests.ray import jobs
from tests.ray.clusters import local, needs_ray
from tests.ray.jobs import Train

pytestmark = needs_ray
QUICK = Limits(heartbeat=0.5, patience=5.0, room=5.0, stop=60.0)


@pytest.fixture(autouse=True, scope="module")
def cluster():
    local()


def on_two(job, **about):
    return launch(job, learners=[2], engines=2, limits=QUICK, say=lambda text: None, **about)


def processes():
    """Process ids of actors on this machine."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if line.startswith(("ray::Rank", "ray::Host", "ray::Board")):
            found.add(int(folder.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = processes()
    yield
    until = time.monotonic() + 15
    while processes() - before and time.monotonic() < until:
        time.sleep(0.1)
    assert processes() - before == set()


@pytest.mark.parametrize("max_lag", [0, 1])
def test_two_learners_and_two_engines_have_the_numbers_of_a_run_without_ray(max_lag, tmp_path):
    from tests.e2e.test_ranks import launch as without_ray

    folder = tmp_path / "plain"
    without_ray(folder, 2, file=jobs.__file__, run=str(max_lag))
    want, weights = torch.load(folder / "rows.json.pt", weights_only=False)
    seen, said = [], []
    job = Train(options={"max_lag": max_lag, "output_dir": str(tmp_path / "ray")})
    found, moved = launch(
        job, learners=[2], engines=2, limits=QUICK, on_row=seen.append, say=said.append
    )
    assert found == want
    assert len(want) == 4
    assert all(torch.equal(x, weights[name]) for name, x in moved.items())
    assert [row["step"] for row in seen if "objective/scores" in row] == [1, 2, 3, 4]
    assert "learner 0, 1" in said[0]
    assert "engine 1" in said[0]
