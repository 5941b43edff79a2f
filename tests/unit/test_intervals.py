"""Printed intervals hold the truth as often as they say."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kedge.math.intervals import share_interval, t_quantile

Draw = Callable[[random.Random, float, int], list[float]]


def alike(draw: random.Random, truth: float, size: int) -> list[float]:
    """The prompt decides the outcome."""
    return [float(draw.random() < truth)] * size


def unrelated(draw: random.Random, truth: float, size: int) -> list[float]:
    return [float(draw.random() < truth) for _ in range(size)]


def related(draw: random.Random, truth: float, size: int) -> list[float]:
    """Each prompt has a rate of its own."""
    return unrelated(draw, draw.betavariate(2 * truth, 2 * (1 - truth)), size)


@pytest.mark.parametrize("truth", [0.5, 0.8])
@pytest.mark.parametrize("group", [alike, unrelated, related])
@pytest.mark.parametrize(("groups", "size"), [(5, 8), (20, 8), (25, 1), (100, 2)])
def test_coverage(groups: int, size: int, group: Draw, truth: float) -> None:
    """20 prompts of 8 equal answers: a bootstrap over answers held the truth in 44%."""
    draw = random.Random(0)
    held = 0
    for _ in range(600):
        low, high = share_interval([group(draw, truth, size) for _ in range(groups)])
        held += low <= truth <= high
    assert held / 600 >= 0.92


def test_by_hand() -> None:
    assert share_interval([[1.0]] * 8 + [[0.0]] * 2) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert share_interval([[1.0]] * 12) == pytest.approx((0.7575, 1.0), abs=1e-4)
    assert share_interval([[1.0] * 8] * 12)[0] == pytest.approx(0.7124, abs=1e-3)  # t, 11 degrees
    assert share_interval([[1.0] * 50 + [0.0] * 50]) == pytest.approx((0.0546, 0.9454), abs=1e-3)


@pytest.mark.parametrize(
    ("degrees", "want"), [(1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (100, 1.984)]
)
def test_quantiles_of_t(degrees: int, want: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(want, rel=4e-3)
