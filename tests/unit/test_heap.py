"""Freed memory of a CPU is kept for the next pass, or goes back to the system."""

import platform

import pytest

from tests import processes

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
FRESH = """
from pathlib import Path
import torch
from kedge.ops.cpu.patch import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

for keep in (False, True):
    keep_freed_memory(keep)
    before = resident()
    blocks, pins = [], []
    for _ in range(16):
        blocks.append(torch.ones(2 << 20))
        pins.append(torch.ones(1 << 9))
    blocks.clear()
    print(resident() - before)
    pins.clear()
"""


@glibc
def test_freed_blocks_between_small_ones_are_kept_or_returned():
    done = processes.run("-c", FRESH)
    assert done.returncode == 0, done.stderr[-3000:]
    left, kept = map(int, done.stdout.split())
    assert kept > 100
    assert left < 64
