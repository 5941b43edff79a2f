"""Freed memory goes back to the system where the C library keeps it."""

import sys
from pathlib import Path

import pytest
import torch

from kedge.backends.hf import learner
from kedge.ops.cpu import heap
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


def iteration(megabytes):
    """Memory of the process after an iteration that needed so much, and before."""
    heap.keep_free_memory()
    before = resident()
    torch.ones(megabytes << 18)
    heap.end_iteration()
    return resident(), before


@linux
@pytest.mark.skipif(heap._glibc() is None, reason="needs glibc 2.33")
def test_kept_memory_stays_for_the_next_iteration_until_the_process_grows():
    heap.release_free_memory(0)
    before = resident()
    with heap.kept_between_iterations():
        assert iteration(300)[0] > before + (280 << 20)  # memory was not yet kept at its start
        assert iteration(300)[1] > before + (280 << 20)
        assert iteration(301)[0] > before + (280 << 20)
        assert iteration(900)[0] < before + (64 << 20)  # has grown
        assert iteration(300)[0] > before + (280 << 20)  # kept again
        assert iteration(300)[0] > before + (280 << 20)
    assert resident() < before + (64 << 20)
    assert not heap._changed


@linux
@pytest.mark.skipif(heap._glibc() is None, reason="needs glibc 2.33")
def test_outside_a_run_memory_is_returned_at_the_end_of_an_iteration():
    heap.release_free_memory(0)
    for _ in range(3):
        after, before = iteration(300)
        assert after < before + (64 << 20)
        assert not heap._changed


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
