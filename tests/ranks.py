"""Processes that are ranks of one run: their start and their end."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from torch import distributed

from tests import processes


def run_ranks(world: int, *arguments: str | Path, timeout: float = 300, **env: str) -> None:
    """Run Python with these arguments in ``world`` processes; all must end well."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    common = os.environ | env | {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [str(x) for x in arguments]
    running = [
        processes.start(*command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout)
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()


def leave(found: Any = None, out: str | Path = "") -> None:
    """Part from the other ranks and end this process; the first writes what it found to ``out``.

    Under shards torch can abort while the interpreter, at its own end, takes down gloo's threads.
    """
    if out and os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    if distributed.is_initialized():
        distributed.barrier()  # neither leaves while the other still talks
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
