"""Runs a command while standard input stays open, then ends it with all that it started.

The parent process holds the other end of the pipe, so however it ends, the pipe closes and the
command ends too.  Its processes have time to release shared memory before they are killed.
Uses only the standard library, so that it runs in any Python:
``python process_guard.py SECONDS COMMAND...``, as the leader of a new process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def main(argv: list[str]) -> None:
    """Run ``argv[1:]``; after the pipe closes, SIGTERM, and SIGKILL ``argv[0]`` seconds later."""
    grace, command = float(argv[0]), argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group may get it, including this process
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # no other thread runs yet:
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),  # noqa: PLW1509
    )
    threading.Thread(target=_end_with_the_pipe, args=(child, grace), daemon=True).start()
    if child.wait() not in (0, -signal.SIGTERM):  # it crashed, and tells the others nothing
        os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while _others_run() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)  # kills remaining children, and this process


def _end_with_the_pipe(child: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(0, 4096):
        pass
    child.terminate()  # alone: it ends the others, in the order in which they can be ended
    time.sleep(grace)
    os.killpg(0, signal.SIGKILL)


def _others_run() -> bool:
    """Whether other processes of this group run; False on systems without /proc."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = file.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(group) == os.getpgrp() and state != "Z" and file.parent.name != str(os.getpid()):
            return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
