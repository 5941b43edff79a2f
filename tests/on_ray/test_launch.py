"""Learners on Ray: the numbers of learners without it, and how they end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass

import psutil
import pytest
import torch

from kedge.ext.ray import LaunchLimits, launch
from kedge.records.errors import ConfigError, LaunchError
from tests.e2e import test_ranks as ranks
from tests.on_ray import jobs
from tests.on_ray.clusters import local, needs_ray
from tests.on_ray.jobs import Both, Train

pytestmark = needs_ray
QUICK = LaunchLimits(heartbeat=0.5, patience=5.0, placement=5.0)


@pytest.fixture(autouse=True, scope="module")
def cluster():
    local()


def on_two(job, **about):
    return launch(job, learners=[2], limits=QUICK, **about)


def processes():
    """Process ids of the actors that this process has to answer for."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()).startswith(
                ("ray::Learner", "ray::Engine", "ray::DriverMailbox")
            ):
                found.add(process.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = processes()
    yield
    until = time.monotonic() + 60
    while processes() - before and time.monotonic() < until:
        time.sleep(0.1)
    assert processes() - before == set()


def test_two_learners_and_two_engines_have_the_numbers_of_a_run_without_ray(tmp_path, capsys):
    from tests.e2e.test_ranks import launch as without_ray

    folder = tmp_path / "plain"
    without_ray(folder, 2, file=jobs.__file__)
    want = torch.load(folder / "rows.json.pt", weights_only=False)
    seen = []
    found = launch(
        Both(str(tmp_path / "ray"), "ray"),
        learners=[2],
        engines=2,
        limits=QUICK,
        on_row=seen.append,
    )
    for (rows, weights), (expected, others) in zip(found, want, strict=True):
        assert rows == expected
        assert all(torch.equal(x, others[name]) for name, x in weights.items())
    assert [row["rollout/lag"] for row in found[1][0]] == [0, 1, 1, 1]
    steps = [row["step"] for row in seen if "objective/scores" in row]
    assert steps == [1, 2, 3, 4, 1, 2, 3, 4]
    said = capsys.readouterr().out
    assert "learner 0, 1" in said
    assert "engine 1" in said


@pytest.mark.parametrize("in_flight", [False, True])
def test_two_learners_share_three_engines(in_flight, tmp_path):
    options = {
        "output_dir": str(tmp_path),
        "total_episodes": 8 * ranks.STEPS,
        "num_ppo_epochs": 1,
        "max_lag": 2,
        "response_length": 16,
        "in_flight_weight_updates": in_flight,
    }
    found, trained, about = on_two(jobs.AsDone(options), engines=3)
    ranks.check_shares(found, trained, [x["scored"] for x in about])
    assert [len(x["pids"]) for x in about] == [3, 0]
    assert [x["copies"] for x in about] == [ranks.STEPS + 1, 0]  # gathered and sent once a version


@dataclass
class WarnAndTrain:
    """Warns, and comes to grief."""

    train: Train

    def __call__(self):
        logging.getLogger("kedge.some.part").warning("rank %s warns", os.environ["RANK"])
        return self.train()


def test_warnings_are_heard_and_the_root_error_comes_before_what_followed(tmp_path, caplog):
    job = WarnAndTrain(Train(options={"output_dir": str(tmp_path)}, strike=(1, 2, "raise")))
    with pytest.raises(LaunchError) as caught:
        on_two(job)
    lines = str(caught.value).splitlines()
    assert lines[0] == "learner 1 of 2: ZeroDivisionError: a bug in a callback"
    assert "Traceback" in str(caught.value)
    assert "jobs.py" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    heard = {r.getMessage() for r in caplog.records}
    assert heard >= {"learner 0: rank 0 warns", "learner 1: rank 1 warns"}


def test_a_job_that_cannot_be_sent_is_refused():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="the job cannot be pickled"):
        launch(lambda: lock, limits=QUICK)


def test_an_error_of_kedge_comes_as_it_is(tmp_path):
    job = Train(options={"output_dir": str(tmp_path), "num_mini_batches": 3})
    with pytest.raises(ConfigError, match="num_mini_batches=3"):
        launch(job, limits=QUICK)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", "is gone: it was killed (perhaps out of memory) or crashed"),
        ("stop", "did not respond for 5 s (worker_timeout)"),
    ],
)
def test_a_learner_that_dies_or_hangs_ends_the_run(fault, message, tmp_path):
    """That a run goes on from such a checkpoint: test_async_command.py."""
    options = {"max_lag": 1, "total_episodes": 48, "save_strategy": "steps", "save_steps": 2}
    options |= {"output_dir": str(tmp_path)}
    with pytest.raises(LaunchError) as caught:
        on_two(Train(options=options, strike=(1, 3, fault)))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("learner 1 of 2 (process ")
    assert message in lines[0]
    assert "resume_from_checkpoint=True" in lines[-1]
    assert (tmp_path / "checkpoint-2").is_dir()


@pytest.mark.parametrize(("strike", "limit"), [("pause", 60), ("held", 4)])
def test_a_signal_stops_after_this_iteration_with_a_checkpoint_and_no_process_is_left(
    strike, limit, tmp_path
):
    """The limit counts from the end of the iteration, which is longer; one is held after it."""
    code = f"""
        from kedge.ext.ray import LaunchLimits, launch
        from tests.on_ray.jobs import Train

        options = {{"total_episodes": 80000, "max_lag": 1, "output_dir": {str(tmp_path)!r}}}
        launch(
            Train(options=options, strike=(0, 3, {strike!r})), learners=[2],
            limits=LaunchLimits(start=900.0, stop={limit}),
            on_row=lambda row: print(row.get("step"), flush=True),
        )
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.strip() == "3":
            break
    theirs = psutil.Process(process.pid).children(recursive=True)
    assert len(theirs) > 4, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=200)[1]
    if strike == "pause":
        assert process.returncode == 128 + signal.SIGTERM
    else:
        assert "learner 0, learner 1 did not exit within 4 s of the last iteration" in said
    _, alive = psutil.wait_procs(theirs, timeout=60)
    assert alive == []
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
