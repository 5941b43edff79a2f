"""Signals to stop: a wish first, an order when repeated."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kedge.loop.shutdown import GracefulShutdown


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
