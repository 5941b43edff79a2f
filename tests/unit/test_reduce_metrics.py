"""What reward functions measured, over ranks that know different things."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from kedge.loop.metrics import reduce_metrics


class Board:
    """Sums tensors over threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.laid = threading.Barrier(ranks), {}

    def total(self, rank: int, x: Tensor) -> Tensor:
        self.laid[rank] = x
        self.barrier.wait(10)
        found = sum(self.laid.values())
        self.barrier.wait(10)
        return found


class Rank:
    def __init__(self, rank: int, world_size: int, board: Board) -> None:
        self.rank, self.world_size, self.board = rank, world_size, board

    def total(self, x: Tensor) -> Tensor:
        return self.board.total(self.rank, x)


def over(*said: dict[str, tuple[float, float]]) -> list[dict[str, float]]:
    board = Board(len(said))
    with ThreadPoolExecutor(len(said)) as pool:
        each = [Rank(i, len(said), board) for i in range(len(said))]
        return list(pool.map(reduce_metrics, said, each))  # type: ignore[arg-type]


def test_names_of_all_ranks_and_means_over_all_calls() -> None:
    found = over(
        {"gsm8k_reward": (3.0, 4.0)}, {"gsm8k_reward": (0.0, 1.0), "größe": (5.0, 2.0)}, {}
    )
    assert found == [{"gsm8k_reward": pytest.approx(3 / 5), "größe": 2.5}] * 3


@pytest.mark.parametrize("said", [{}, {"a": (1.0, 2.0)}])
def test_one_rank_alone_and_ranks_that_say_nothing(said: Any) -> None:
    assert over(said) == [{k: top / count for k, (top, count) in said.items()}]
    assert over({}, {}) == [{}, {}]
