"""Freed memory goes back to the system where the C library keeps it."""

import sys
from pathlib import Path

import pytest
import torch

from kedge.ops.cpu import heap

linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@linux
@pytest.mark.skipif(heap._glibc() is None, reason="needs glibc 2.33")
def test_memory_between_small_blocks_is_returned():
    torch.ones(4 << 20)  # 16 MB: from now on smaller blocks stay in the heap
    blocks, pins = [], []
    for _ in range(32):
        blocks.append(torch.ones(1 << 20))
        pins.append(torch.ones(1 << 9))
    before = resident()
    blocks.clear()
    assert heap.release_free_memory(1 << 20)
    assert resident() < before - (64 << 20)
    assert all(bool((x == 1).all()) for x in pins)


@linux
@pytest.mark.skipif(heap._glibc() is None, reason="needs glibc 2.33")
def test_large_blocks_stay_until_they_are_released():
    heap.keep_free_memory()
    try:
        block = torch.ones(24 << 20)  # 96 MB
        full = resident()
        del block
        assert resident() > full - (32 << 20)
    finally:
        assert heap.release_free_memory(1 << 20)
    assert resident() < full - (64 << 20)


def test_little_free_memory_stays():
    assert not heap.release_free_memory(sys.maxsize)
