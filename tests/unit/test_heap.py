"""Freed memory goes back to the system where the C library keeps it."""

import ast
import sys
from pathlib import Path

import pytest
import torch

from kedge.backends.hf import learner
from kedge.ops.cpu import heap
from tests import processes
from tests.e2e.small import small

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


FRESH = """
import torch
from kedge.ops.cpu import heap
from tests.unit.test_heap import resident

def iteration(megabytes):
    heap.keep_free_memory()
    before = resident()
    torch.ones(megabytes << 18)
    heap.end_iteration()
    return before - start >> 20, resident() - start >> 20

start = 0
iteration(1)
start = resident()
print([iteration(300) for _ in range(3)], heap._changed)
with heap.kept_between_iterations():
    print([iteration(size) for size in (300, 300, 301, 900, 300)])
print(resident() - start >> 20, heap._changed)
"""


@linux
@pytest.mark.skipif(heap._glibc() is None, reason="needs glibc 2.33")
def test_in_a_run_kept_memory_stays_for_the_next_iteration_until_the_process_grows():
    done = processes.run("-c", FRESH)
    assert done.returncode == 0, done.stderr[-3000:]
    outside, inside, end = done.stdout.splitlines()
    spent, changed = ast.literal_eval(outside.removesuffix(" set()")), outside[-5:]
    assert changed == "set()"
    assert all(before < 64 and after < 64 for before, after in spent)
    first, *others = ast.literal_eval(inside)
    assert first[0] < 64
    assert first[1] > 280
    full = [(before > 280, after > 280) for before, after in others]
    # the fourth has grown and returns its memory, which the fifth takes again
    assert full == [(True, True), (True, True), (True, False), (False, True)]
    left, changed = end.split(" ", 1)
    assert int(left) < 64
    assert changed == "set()"


@linux
@pytest.mark.skipif(heap._glibc() is None, reason="needs glibc 2.33")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_keeps_memory_without_checkpointing_and_returns_it_even_if_it_fails(
    checkpointing, monkeypatch
):
    states = []
    usual = heap.end_iteration

    def seen():
        usual()
        states.append((heap._Run.whole, bool(heap._changed)))
        if len(states) == 2:
            raise RuntimeError("the power is off")

    monkeypatch.setattr(learner, "end_iteration", seen)
    made = small(gradient_checkpointing=checkpointing)
    with pytest.raises(RuntimeError, match="the power"):
        made.train()
    assert states == [(not checkpointing, not checkpointing)] * 2
    assert (heap._Run.active, heap._Run.whole, heap._changed) == (False, False, set())
