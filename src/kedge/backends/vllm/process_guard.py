"""Runs a command for as long as standard input stays open, and leaves nothing of it behind.

The process that starts it holds the other end of the pipe: however that process ends, the pipe
closes, and the command's whole process group is ended.  Standard library alone, so that it runs in
any Python: ``python keeper.py SECONDS COMMAND...``, as leader of a process group of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main(argv: list[str]) -> None:
    """Run ``argv[1:]``; after the pipe closes, give it ``argv[0]`` seconds to end by itself."""
    grace, command = float(argv[0]), argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the whole group
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=_terminable,  # noqa: PLW1509  (no other thread runs yet)
    )
    threading.Thread(target=_end_with_the_pipe, args=(child, grace), daemon=True).start()
    child.wait()
    os.killpg(0, signal.SIGKILL)  # what it left, and this process


def _terminable() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_the_pipe(child: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    until = time.monotonic() + grace
    while child.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
