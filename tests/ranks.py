"""The end of a process that was one rank of several."""

from __future__ import annotations

import os
import sys

from torch import distributed


def leave() -> None:
    """Part from the other ranks and end this process, which has written what it found.

    Under shards torch can abort while the interpreter, at its own end, takes down gloo's threads.
    """
    if distributed.is_initialized():
        distributed.barrier()  # neither leaves while the other still talks
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
