"""Runs a command while standard input stays open, then kills its whole process group.

The parent process holds the other end of the pipe, so however it ends, the pipe closes and the
command ends too.  Uses only the standard library, so that it runs in any Python:
``python process_guard.py SECONDS COMMAND...``, as the leader of a new process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main(argv: list[str]) -> None:
    """Run ``argv[1:]``; after the pipe closes, SIGTERM, and SIGKILL ``argv[0]`` seconds later."""
    grace, command = float(argv[0]), argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the whole group gets it, including this process
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # no other thread runs yet:
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),  # noqa: PLW1509
    )
    threading.Thread(target=_end_with_the_pipe, args=(child, grace), daemon=True).start()
    child.wait()
    os.killpg(0, signal.SIGKILL)  # kills remaining children, and this process


def _end_with_the_pipe(child: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
