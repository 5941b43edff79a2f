"""What a run sets for its process, where it may start, and signals to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from kedge.config.ppo import PPOConfig
from kedge.errors import CheckpointError
from kedge.loop.shutdown import GracefulShutdown
from kedge.trainers.base import configure_process
from kedge.trainers.hf_callbacks import Callbacks
from kedge.trainers.run import earlier_run


@pytest.fixture(autouse=True)
def _put_back():
    yield
    torch.use_deterministic_algorithms(False)


def config(tmp_path, **options):
    return PPOConfig(output_dir=str(tmp_path / "out"), **options)


def test_full_determinism_is_asked_of_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # set by it; put back afterwards
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    configure_process(config(tmp_path))
    assert not torch.are_deterministic_algorithms_enabled()
    configure_process(config(tmp_path, full_determinism=True))
    assert torch.are_deterministic_algorithms_enabled()


def test_each_process_has_its_log_level(tmp_path, monkeypatch):
    before = transformers_logging.get_verbosity()
    configure_process(config(tmp_path))
    assert transformers_logging.get_verbosity() == before
    configure_process(config(tmp_path, log_level="error"))
    assert transformers_logging.get_verbosity() == logging.ERROR
    assert logging.getLogger("kedge").level == logging.ERROR
    other = config(tmp_path, log_level="debug", log_level_replica="critical")
    monkeypatch.setattr(other.distributed_state, "local_process_index", 1)
    monkeypatch.setattr(other.distributed_state, "process_index", 1)
    configure_process(other)
    assert logging.getLogger("kedge").level == logging.CRITICAL


def test_a_new_run_does_not_mix_with_an_earlier_one(tmp_path):
    assert earlier_run(tmp_path, overwrite=False) == []
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-12").mkdir()
    with pytest.raises(CheckpointError, match="holds checkpoint-4, checkpoint-12 of an earlier"):
        earlier_run(tmp_path, overwrite=False)
    found = earlier_run(tmp_path, overwrite=True)
    assert [p.name for p in found] == ["checkpoint-4", "checkpoint-12"]


def test_tensorboard_writes_where_logging_dir_says(tmp_path):
    where = str(tmp_path / "curves")
    made = Callbacks(config(tmp_path, report_to="tensorboard", logging_dir=where))
    found = [c.logging_dir for c in made.handler.callbacks if hasattr(c, "logging_dir")]
    assert found == [where]


def test_an_experiment_that_has_a_name_names_the_run(tmp_path):
    assert config(tmp_path).run_name is None
    assert config(tmp_path, exp_name="mine").run_name == "mine"
    assert config(tmp_path, exp_name="mine", run_name="this").run_name == "this"


def test_a_signal_is_recorded_although_nobody_reads_the_screen():
    read, write = os.pipe()
    os.close(read)
    screen = os.dup(2)
    os.dup2(write, 2)
    wishes = GracefulShutdown()
    try:
        with wishes.install():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(write)
    assert wishes.requested


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_first_signal_is_a_wish_and_the_second_an_order(number, raised, capfd):
    wishes = GracefulShutdown()
    before = signal.getsignal(number)
    with wishes.install():
        assert not wishes.newly_requested()
        os.kill(os.getpid(), number)
        assert [wishes.newly_requested(), wishes.newly_requested()] == [True, False]
        name = signal.Signals(number).name
        assert f"kedge: {name}: stopping after this iteration" in capfd.readouterr().err
        with pytest.raises(raised):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    with pytest.raises(raised):
        wishes.reraise()
    other = signal.SIGTERM if number == signal.SIGINT else signal.SIGINT
    wishes = GracefulShutdown()
    with wishes.install():  # what a launcher adds is not a second wish
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), other)
    with pytest.raises(raised):
        wishes.reraise()


def test_an_actor_ends_with_the_process_that_started_it() -> None:
    """Ray leaves an actor running whose raylet was killed."""
    actor = (
        "import os; from kedge.loop.shutdown import exit_with; parent = os.getppid();"
        "print(os.getpid(), flush=True); exit_with(parent, every=0.05)"
    )
    raylet = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
        "time.sleep(60)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", raylet, actor], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    started.kill()
    started.wait()
    begin = time.monotonic()
    while Path(f"/proc/{pid}").exists() and not zombie(pid):
        assert time.monotonic() - begin < 50
        time.sleep(0.05)
    started.stdout.close()


def zombie(pid: int) -> bool:
    """Whether a process has ended and nobody has waited for it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
