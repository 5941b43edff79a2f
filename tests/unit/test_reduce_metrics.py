"""What reward functions measured, over ranks that know different things."""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kedge.loop.evaluation import pass_at_k, solve_rates, win_rate
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


NAN = math.nan


def scores(*rows: float) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_that_solve(n: int) -> None:
    for c in range(n + 1):
        outcomes = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(outcomes, k))
            want = sum(any(draw) for draw in draws) / len(draws)
            got = pass_at_k(torch.tensor([n]), torch.tensor([c]), k)
            assert float(got) == pytest.approx(want, abs=1e-14)


def test_pass_at_k_of_many_samples_needs_no_large_number() -> None:
    got = float(pass_at_k(torch.tensor([10_000]), torch.tensor([3]), 100))
    assert got == pytest.approx(1 - math.comb(9_997, 100) / math.comb(10_000, 100), rel=1e-12)
    assert got != pytest.approx(1 - (1 - 3 / 10_000) ** 100, rel=1e-3)  # the biased one


def test_pass_at_k_wants_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(torch.tensor([4, 2]), torch.tensor([1, 1]), 3)


def test_solved_by_hand() -> None:
    # Two prompts of four: two of four solve the first, none the second.
    found = solve_rates(scores(1, 0, 0.9, 0.8, 0, 0, 0, 0.1), per_prompt=4, success=0.9)
    assert found == pytest.approx({"accuracy": 0.25, "pass@2": (1 - 1 / 6) / 2, "pass@4": 0.5})
    assert solve_rates(scores(1, 0, 1), per_prompt=1, success=1.0) == pytest.approx(
        {"accuracy": 2 / 3}
    )
    assert list(solve_rates(scores(*[1.0] * 6), per_prompt=6, success=1.0)) == [
        *("accuracy", "pass@2", "pass@4", "pass@6")
    ]


def test_what_could_not_be_scored_counts_neither_way() -> None:
    found = solve_rates(scores(1, NAN, 0, 0, NAN, NAN), per_prompt=2, success=1.0)
    assert found == {"accuracy": 0.5, "pass@2": 0.0}  # the first and the third have fewer than two
    assert win_rate(scores(2, NAN, 1), scores(1, 0, NAN)) == {"win_rate": 1.0}
    assert win_rate(scores(NAN), scores(1)) == {}


def test_win_rate_by_hand() -> None:
    assert win_rate(scores(2, 1, 0, 5), scores(1, 1, 1, 4)) == {"win_rate": 0.625}
