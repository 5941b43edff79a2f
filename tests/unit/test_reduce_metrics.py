"""What reward functions measured, over ranks that know different things."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import Tensor

from kedge.loop.metrics import reduce_metrics


class Rank:
    """Sums tensors over threads."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, laid: dict) -> None:
        self.rank, self.world_size, self.barrier, self.laid = rank, world_size, barrier, laid

    def all_reduce(self, x: Tensor) -> Tensor:
        self.laid[self.rank] = x
        self.barrier.wait(10)
        found = sum(self.laid.values())
        self.barrier.wait(10)
        return found


def over(*said: dict[str, tuple[float, float]]) -> list[dict[str, float]]:
    shared = threading.Barrier(len(said)), {}
    with ThreadPoolExecutor(len(said)) as pool:
        each = [Rank(i, len(said), *shared) for i in range(len(said))]
        return list(pool.map(reduce_metrics, said, each))  # type: ignore[arg-type]


def test_names_of_all_ranks_and_means_over_all_calls() -> None:
    found = over(
        {"gsm8k_reward": (3.0, 4.0)}, {"gsm8k_reward": (0.0, 1.0), "größe": (5.0, 2.0)}, {}
    )
    assert found == [{"gsm8k_reward": pytest.approx(3 / 5), "größe": 2.5}] * 3
    assert over({}) == [{}]  # one rank alone, and ranks that say nothing
    assert over({"a": (1.0, 2.0)}) == [{"a": 0.5}]
    assert over({}, {}) == [{}, {}]
