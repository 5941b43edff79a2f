"""Formulas against hand-worked answers and plain-Python float64 references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.math.advantage import (
    gae,
    group_mean,
    group_normalize,
    group_std,
    leave_one_out,
    length_adaptive_lambda,
    rewards_to_go,
)
from kedge.math.kl import absolute, k1, k2, k3
from kedge.math.losses import (
    Clip,
    clipped_policy_loss,
    clipped_value_loss,
    policy_is_clipped,
    row_mean,
    row_then_token_mean,
    token_mean,
    value_is_clipped,
)
from kedge.math.masked import extend, last_true, masked_mean, moments, one_rank, standardize, whiten
from kedge.math.ratios import Correction, importance_weights, mean_over_tokens, ratios
from kedge.math.rewards import overlong_penalty, place_score
from tests.unit.advantage_inputs import prefix


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
    assert whiten(torch.tensor([5.0]), torch.tensor([True])).tolist() == [0.0]
    x[0, 3] = math.nan
    mean, std = moments(x, mask)
    assert (mean.item(), std.item()) == (2.0, 1.0)
    assert standardize(x, mask, eps=1.0).tolist() == [[-0.5, 0.0, 0.5, 0.0]]


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


def test_clipped_value_loss_by_hand() -> None:
    v, old, g = torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0])
    assert clipped_value_loss(v, old, g, clip=0.2).tolist() == pytest.approx([1.62, 0.405])
    assert value_is_clipped(v, old, g, clip=0.2).tolist() == [True, False]


def test_weightings_sum_to_one_and_say_what_they_do() -> None:
    mask = prefix([1, 3, 0, 2], 3)
    assert token_mean(mask, one_rank)[1].tolist() == pytest.approx([1 / 6] * 3)
    assert row_mean(mask, one_rank).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert row_then_token_mean(mask, one_rank)[3].tolist() == pytest.approx([1 / 6, 1 / 6, 0])
    for weigh in (token_mean, row_then_token_mean):
        assert float(weigh(mask, one_rank).sum()) == pytest.approx(1.0)
        assert float(weigh(torch.zeros_like(mask), one_rank).sum()) == 0.0


ALL = torch.ones(12, dtype=torch.bool)
# Three prompts with four responses each, first responses first.
REWARDS = torch.tensor([1.0, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10])
PROMPT = torch.tensor([0, 1, 2] * 4)


def test_leave_one_out_of_three_prompts_with_four_responses() -> None:
    found = leave_one_out(REWARDS, PROMPT, ALL)
    assert found[0].item() == pytest.approx(1 - (2 + 5 + 8) / 3)
    assert found[7].item() == pytest.approx(6 - (3 + 2 + 9) / 3)
    square = REWARDS.reshape(4, 3)
    want = square - (square.sum(0) - square) / 3
    torch.testing.assert_close(found, want.flatten())


def test_groups_are_found_by_id_wherever_rows_stand() -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    names = torch.tensor([70, -3, 12])[PROMPT]
    for function in (leave_one_out, group_mean, group_std):
        want = function(REWARDS, PROMPT, ALL)
        found = function(REWARDS[order], names[order], ALL)
        assert torch.equal(found, want[order])


def test_a_dropped_row_shifts_no_baseline() -> None:
    valid = ALL.clone()
    valid[3] = False  # the second response to the first prompt, which scored 2
    scores = REWARDS.clone()
    scores[3] = math.nan
    found = leave_one_out(scores, PROMPT, valid)
    assert found[0].item() == pytest.approx(1 - (5 + 8) / 2)
    assert found[3].item() == 0.0
    kept = valid & (PROMPT == 0)
    torch.testing.assert_close(found[kept], leave_one_out(REWARDS[kept], PROMPT[kept], valid[kept]))
    others = PROMPT != 0
    assert torch.equal(found[others], leave_one_out(REWARDS, PROMPT, ALL)[others])
    assert group_mean(scores, PROMPT, valid)[0].item() == pytest.approx((1 + 5 + 8) / 3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_only_survivor_of_a_group_has_advantage_0(scale: str) -> None:
    scores = torch.tensor([4.0, math.nan, 1.0, 3.0])
    group, valid = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, True, True])
    assert leave_one_out(scores, group, valid).tolist() == [0.0, 0.0, -2.0, 2.0]
    found = group_normalize(scores, group, valid, scale=scale, all_reduce=one_rank)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2].item() < 0 < found[3].item()


@pytest.mark.parametrize("size", [1.0, 1000.9, -3e6])
def test_scores_that_differ_by_rounding_have_no_advantage(size: float) -> None:
    """One of four scores is a float32 unit lower, as sums of equal rewards are."""
    scores = torch.full((4,), size)
    scores[2] = torch.nextafter(scores[2], torch.tensor(-torch.inf))
    group, valid = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    assert not group_std(scores, group, valid).any()
    found = group_normalize(scores, group, valid, scale="group", all_reduce=one_rank)
    assert not found.any()
    scores[2] = size + abs(size) * 1e-5  # a difference
    found = group_normalize(scores, group, valid, scale="group", all_reduce=one_rank)
    assert found[2] > 0 > found[0]


def test_group_normalize_by_hand() -> None:
    scores, group = torch.tensor([1.0, 3.0, 10.0, 10.0]), torch.tensor([0, 0, 1, 1])
    valid = torch.ones(4, dtype=torch.bool)

    def found(scale: str) -> Tensor:
        return group_normalize(scores, group, valid, scale=scale, all_reduce=one_rank)

    assert found("none").tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert found("group").tolist() == pytest.approx(
        [-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 0, 0]
    )
    batch = (((-5) ** 2 + (-3) ** 2 + 4**2 + 4**2) / 3) ** 0.5 + 1e-4
    assert found("batch").tolist() == pytest.approx([-1 / batch, 1 / batch, 0, 0])
    # Equal scores give exactly 0.
    scores, group = torch.full((6,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1])
    valid = torch.ones(6, dtype=torch.bool)
    assert found("group").tolist() == [0.0] * 6
    assert group_std(scores, group, valid).tolist() == [0.0] * 6
    assert leave_one_out(scores, group, valid).tolist() == [0.0] * 6


def test_rewards_to_go_steps_over_tokens_off_the_mask() -> None:
    rewards = torch.tensor([[1.0, 7.0, 2.0, 4.0]])
    mask = torch.tensor([[True, False, True, True]])
    assert rewards_to_go(rewards, mask, gamma=0.5).tolist() == [[3.0, 0.0, 4.0, 4.0]]


def test_length_adaptive_lambda_and_overlong_penalty() -> None:
    found = length_adaptive_lambda(prefix([40, 200, 4], 200), alpha=0.05)
    assert found.tolist() == pytest.approx([0.5, 0.9, 0.0])
    lengths = torch.tensor([10, 60, 70, 80, 100, 120])
    found = overlong_penalty(lengths, longest=100, buffer=40)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "loss", "stuck"),
    [
        (1.25, 1.0, Clip(0.2), -1.2, True),
        (0.5, 1.0, Clip(0.2), -0.5, False),
        (1.5, -1.0, Clip(0.2), 1.5, False),
        (0.5, -1.0, Clip(0.2), 0.8, True),
        (1.1, 2.0, Clip(0.2), -2.2, False),
        (1.25, 1.0, Clip(0.2, 0.28), -1.25, False),
        (1.3, 1.0, Clip(0.2, 0.28), -1.28, True),
        (0.75, 1.0, Clip(0.2, 0.28), -0.75, False),
        (0.75, -1.0, Clip(0.2, 0.28), 0.8, True),
        (5.0, -1.0, Clip(0.2), 5.0, False),
        (5.0, -1.0, Clip(0.2, ceiling=3.0), 3.0, True),
        (2.5, -1.0, Clip(0.2, ceiling=3.0), 2.5, False),
        (5.0, 1.0, Clip(0.2, ceiling=3.0), -1.2, True),
    ],
)
def test_clips(ratio: float, advantage: float, clip: Clip, loss: float, stuck: bool) -> None:
    r = torch.tensor([ratio], requires_grad=True)
    a = torch.tensor([advantage])
    found = clipped_policy_loss(r, a, clip=clip)
    assert found.item() == pytest.approx(loss)
    assert policy_is_clipped(r, a, clip=clip).item() is stuck
    (grad,) = torch.autograd.grad(found.sum(), r)
    assert (grad.item() == 0) is stuck


def test_the_ratio_of_a_response_has_its_gradient() -> None:
    """With one advantage per response, the tokens' gradients add up to the plain formula's."""
    mask = prefix([3, 1, 0], 3)
    log_ratio = (torch.tensor([[0.1, -0.2, 0.05], [0.1, 0, 0], [0, 0, 0]])).requires_grad_()
    advantage = torch.tensor([2.0, -1.0, 1.0])
    share = mask / mask.sum(1, keepdim=True).clamp(min=1)
    by_token = (share * ratios(log_ratio, mask, "sequence_mean") * advantage[:, None]).sum()
    plain = (mean_over_tokens(log_ratio, mask).exp() * advantage * mask.any(1)).sum()
    assert by_token.item() == pytest.approx(plain.item())
    a, b = (torch.autograd.grad(x, log_ratio)[0] for x in (by_token, plain))
    torch.testing.assert_close(a, b)


def test_importance_weights() -> None:
    mask = prefix([2, 1], 2)
    old = torch.tensor([[3.0, 0.5], [0.25, 9.0]]).log()
    mu = torch.zeros(2, 2)

    def weights(**how: object) -> list[list[float]]:
        return importance_weights(old, mu, mask, Correction(**how)).tolist()

    assert weights() == [[2.0, 0.5], [0.25, 0.0]]
    assert weights(kind="mask", low=0.3, high=4.0)[0] == pytest.approx([3.0, 0.5])
    assert weights(kind="mask", low=0.3, high=4.0)[1] == [0.0, 0.0]
    assert weights(low=0.6)[0] == [2.0, pytest.approx(0.6)]  # truncation has a lower bound too
    assert weights(level="sequence", high=5.0)[0] == pytest.approx([1.5, 1.5])
    mean = 1.5**0.5
    assert weights(level="sequence_mean", high=1.01)[0] == pytest.approx([1.01, 1.01])
    assert weights(level="sequence_mean", high=9.0)[0] == pytest.approx([mean, mean])
    assert weights(kind="mask", level="sequence_mean", high=1.01)[0] == [0.0, 0.0]
