"""Freed memory goes back to the system where the C library keeps it."""

import sys
from pathlib import Path

import psutil
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


@linux
@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/user/run\n", "user/memory.max", "7000\n"),
        ("0::/elsewhere\n", "memory.max", "7000\n"),
        ("4:memory:/job\n0::/\n", "memory/job/memory.limit_in_bytes", "7000\n"),
        ("0::/user\n", "user/memory.max", "max\n"),
        ("4:memory:/\n", "memory/memory.limit_in_bytes", f"{2**63 - 4096}\n"),
    ],
)
def test_the_limit_of_a_container_is_a_limit_of_memory(line, file, text, tmp_path, monkeypatch):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "cgroup").write_text(line)
    monkeypatch.setattr(heap, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(heap, "_CGROUPS", tmp_path)
    total = psutil.virtual_memory().total
    assert heap.memory_limit.__wrapped__() == (7000 if text == "7000\n" else total)
