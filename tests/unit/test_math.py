"""Formulas against hand-worked answers and plain-Python float64 references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.math.advantage import gae
from kedge.math.kl import absolute, k1, k2, k3
from kedge.math.loss_weights import row_mean, row_then_token_mean, token_mean
from kedge.math.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    policy_is_clipped,
    value_is_clipped,
)
from kedge.math.masked import extend, last_true, masked_mean, whiten
from kedge.math.rewards import place_score


def one(x: Tensor) -> Tensor:
    return x


def prefix(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def test_masked_mean_ignores_what_is_off_the_mask_even_nan() -> None:
    x = torch.tensor([1.0, 2.0, math.nan, 100.0])
    assert masked_mean(x, torch.tensor([True, True, False, False])) == 1.5
    assert masked_mean(x, torch.zeros(4, dtype=torch.bool)) == 0.0


def test_whiten_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 99.0]])
    mask = torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(whiten(x, mask), torch.tensor([[-1.0, 0.0, 1.0, 0.0]]))
    kept = whiten(x, mask, center=False)  # var = 1, so the values stay
    torch.testing.assert_close(kept, torch.tensor([[1.0, 2.0, 3.0, 0.0]]))


def test_whiten_over_two_ranks_is_whiten_of_the_whole() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    mask = prefix([5, 2, 0, 3], 5)
    whole = whiten(x, mask)

    def rank(own: slice, other: slice) -> Tensor:
        sums: list[Tensor] = []

        def total(v: Tensor) -> Tensor:  # adds what the other rank sends in the same collective
            y, m = x[other], mask[other]
            if not sums:
                theirs = torch.stack([torch.where(m, y, 0.0).sum(), m.sum().float()])
            else:
                off = torch.where(m, y - sums[0][0] / sums[0][1], 0.0)
                theirs = torch.stack([(off**2).sum(), m.sum().float()])
            sums.append(v + theirs)
            return sums[-1]

        return whiten(x[own], mask[own], total=total)

    first, second = slice(0, 2), slice(2, 4)
    torch.testing.assert_close(torch.cat([rank(first, second), rank(second, first)]), whole)
    alone = torch.cat([whiten(x[first], mask[first]), whiten(x[second], mask[second])])
    assert not torch.allclose(alone, whole)


def test_whiten_of_one_token_is_finite() -> None:
    assert whiten(torch.tensor([5.0]), torch.tensor([True])).tolist() == [0.0]


def test_last_true_and_extend() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    assert last_true(mask).tolist() == [1, 2, -1, 2]
    assert extend(mask).tolist() == [
        [True, True, True],
        [True, True, True],
        [False, False, False],
        [True, False, True],
    ]


def test_place_score() -> None:
    out = place_score(torch.tensor([3.0, -1.0, 7.0]), prefix([2, 3, 0], 3))
    assert out.tolist() == [[0, 3, 0], [0, 0, -1], [0, 0, 0]]


def test_kl_estimators_by_hand() -> None:
    p, q = torch.tensor(math.log(0.5)), torch.tensor(math.log(0.25))
    assert float(k1(p, q)) == pytest.approx(math.log(2))
    assert float(k2(p, q)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(k3(p, q)) == pytest.approx(0.5 - 1 + math.log(2))
    assert float(absolute(q, p)) == pytest.approx(math.log(2))


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    expect = {f.__name__: float((p * f(p.log(), q.log())).sum()) for f in (k1, k2, k3)}
    assert expect["k1"] == pytest.approx(exact)
    assert expect["k3"] == pytest.approx(exact)
    assert abs(expect["k2"] - exact) > 0.005


def gae_by_definition(
    r: list[float], v: list[float], gamma: float, lam: float, after: float
) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, straight from eq. 16."""
    n = len(r)
    coming = [*v[1:], after]
    delta = [r[t] + gamma * coming[t] - v[t] for t in range(n)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    gamma=st.floats(0.5, 1.0),
    lam=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**16),
    cut_off=st.booleans(),
)
def test_gae_is_its_definition(
    lengths: list[int], gamma: float, lam: float, seed: int, cut_off: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(lengths), 6, generator=g, dtype=torch.float64)
    after = torch.randn(len(lengths), generator=g, dtype=torch.float64) if cut_off else None
    out = gae(rewards, values, prefix(lengths, 6), gamma=gamma, lam=lam, after=after)
    for i, n in enumerate(lengths):
        last = 0.0 if after is None else float(after[i])
        want = gae_by_definition(rewards[i, :n].tolist(), values[i, :n].tolist(), gamma, lam, last)
        assert out[i].tolist() == pytest.approx([*want, *[0.0] * (6 - n)], abs=1e-12)


def test_gae_steps_over_tool_output() -> None:
    # Tokens 1 and 2 were written by a tool: the policy's tokens 0 and 3 are neighbors.
    r = torch.tensor([[0.5, 9.0, 9.0, 1.0]])
    v = torch.tensor([[0.2, 7.0, 7.0, 0.4]])
    out = gae(r, v, torch.tensor([[True, False, False, True]]), gamma=0.9, lam=0.8)
    a1 = 1.0 - 0.4
    assert out[0].tolist() == pytest.approx([0.5 + 0.9 * 0.4 - 0.2 + 0.72 * a1, 0, 0, a1])


def test_clipped_losses_by_hand() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    adv = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    want = [-1.2, -0.5, 1.5, 0.8, -2.2]
    assert clipped_policy_loss(ratio, adv, clip=0.2).tolist() == pytest.approx(want)
    stuck = [True, False, False, True, False]
    assert policy_is_clipped(ratio, adv, clip=0.2).tolist() == stuck
    v, old, g = torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0])
    assert clipped_value_loss(v, old, g, clip=0.2).tolist() == pytest.approx([1.62, 0.405])
    assert value_is_clipped(v, old, g, clip=0.2).tolist() == [True, False]


def test_weightings_sum_to_one_and_say_what_they_do() -> None:
    mask = prefix([1, 3, 0, 2], 3)
    assert token_mean(mask, one)[1].tolist() == pytest.approx([1 / 6] * 3)
    assert row_mean(mask, one).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert row_then_token_mean(mask, one)[3].tolist() == pytest.approx([1 / 6, 1 / 6, 0])
    for weigh in (token_mean, row_then_token_mean):
        assert float(weigh(mask, one).sum()) == pytest.approx(1.0)
        assert float(weigh(torch.zeros_like(mask), one).sum()) == 0.0
