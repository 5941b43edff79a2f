"""How long the threads of a CPU product wait for each other at full speed."""

from __future__ import annotations

import functools
import os
import threading

import torch

from kedge.background import in_thread

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# Involuntary context switches per CPU second of a training run with two threads on two cores: 2 to
# 20 on a quiet machine, 59 while it starts, 115 to 220 next to one busy program.
PREEMPTED = 90


def shorten_spins() -> None:
    """Let PyTorch's threads sleep soon at barriers once other programs take their processors.

    A decode step has hundreds of barriers.  GNU OpenMP, which PyTorch uses on Linux, spins at each
    until the last thread arrives, and if another program holds that thread's processor, this takes
    milliseconds.  With more threads in the process than processors, OpenMP spins 100 times instead
    of 300,000, so an idle thread keeps a team of its own.  On a quiet machine spinning is about a
    tenth faster, so this waits until threads are preempted, and then stays.
    ``OMP_WAIT_POLICY=PASSIVE`` does the same from the start, but only if set before torch is
    imported.
    """
    if torch.get_num_threads() > 1 and _was_preempted():
        _keep_idle_team(os.getpid())


_last = [0.0, 0.0]  # involuntary switches and CPU seconds at the last look


def _was_preempted() -> bool:
    """Whether threads of this process were preempted often since the last look."""
    if resource is None:
        return False
    used = resource.getrusage(resource.RUSAGE_SELF)
    now = [float(used.ru_nivcsw), used.ru_utime + used.ru_stime]
    switches, seconds = (after - before for after, before in zip(now, _last, strict=True))
    if seconds < 1.0:
        return False
    _last[:] = now
    return switches / seconds > PREEMPTED


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
