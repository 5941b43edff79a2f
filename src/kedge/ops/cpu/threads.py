"""How long the threads of a CPU product wait for each other at full speed."""

from __future__ import annotations

import functools
import os
import threading

import torch

from kedge.background import in_thread


def shorten_spins() -> None:
    """Let PyTorch's threads sleep soon at barriers instead of spinning for milliseconds.

    A decode step has hundreds of barriers.  GNU OpenMP, which PyTorch uses on Linux, spins at each
    until the last thread arrives, and if another program holds that thread's processor, this takes
    milliseconds: a training run next to one busy program took four times as long and three times
    the CPU time.  With more threads in the process than processors, OpenMP spins 100 times instead
    of 300,000.  So an idle thread keeps a team of its own.  ``OMP_WAIT_POLICY=PASSIVE`` does the
    same, but only if set before torch is imported.
    """
    if torch.get_num_threads() > 1:
        _keep_idle_team(os.getpid())


@functools.cache
def _keep_idle_team(process: int) -> None:
    """One for each process: threads do not survive a fork."""
    started = threading.Event()

    def idle() -> None:
        try:
            torch.get_num_threads()  # torch sets the thread count of a thread at its first query
            torch.zeros(1 << 20).add_(1)  # large enough for several threads
        finally:
            started.set()
        threading.Event().wait()

    in_thread(idle, name="kedge-idle-team")
    started.wait()
