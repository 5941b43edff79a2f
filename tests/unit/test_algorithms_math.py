"""Formulas of the algorithms without a value model, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kedge.math.advantage import (
    group_mean,
    group_normalize,
    group_std,
    leave_one_out,
    length_adaptive_lambda,
    rewards_to_go,
)
from kedge.math.importance import Correction, importance_weights
from kedge.math.losses import Clip, clipped_policy_loss, policy_is_clipped, weighted_policy_loss
from kedge.math.masked import moments, standardize
from kedge.math.ratios import mean_over_tokens, ratios
from kedge.math.rewards import overlong_penalty
from tests.unit.advantage_inputs import one_rank, prefix

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
    found = group_normalize(scores, group, valid, scale=scale, total=one_rank)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2].item() < 0 < found[3].item()


def test_group_normalize_by_hand() -> None:
    scores, group = torch.tensor([1.0, 3.0, 10.0, 10.0]), torch.tensor([0, 0, 1, 1])
    valid = torch.ones(4, dtype=torch.bool)

    def found(scale: str) -> Tensor:
        return group_normalize(scores, group, valid, scale=scale, total=one_rank)

    assert found("none").tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert found("group").tolist() == pytest.approx(
        [-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 0, 0]
    )
    batch = (((-5) ** 2 + (-3) ** 2 + 4**2 + 4**2) / 3) ** 0.5 + 1e-4
    assert found("batch").tolist() == pytest.approx([-1 / batch, 1 / batch, 0, 0])


def test_equal_scores_give_exactly_0() -> None:
    scores = torch.full((6,), 0.1)
    group, valid = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.bool)
    assert group_std(scores, group, valid).tolist() == [0.0] * 6
    assert leave_one_out(scores, group, valid).tolist() == [0.0] * 6
    assert (
        group_normalize(scores, group, valid, scale="group", total=one_rank).tolist() == [0.0] * 6
    )


def test_moments_and_standardize() -> None:
    x, mask = torch.tensor([1.0, 2.0, 3.0, math.nan]), torch.tensor([True, True, True, False])
    mean, std = moments(x, mask)
    assert (mean.item(), std.item()) == (2.0, 1.0)
    assert standardize(x, mask, eps=1.0).tolist() == [-0.5, 0.0, 0.5, 0.0]


def test_rewards_to_go_steps_over_tokens_off_the_mask() -> None:
    rewards = torch.tensor([[1.0, 7.0, 2.0, 4.0]])
    mask = torch.tensor([[True, False, True, True]])
    assert rewards_to_go(rewards, mask, gamma=0.5).tolist() == [[3.0, 0.0, 4.0, 4.0]]


def test_length_adaptive_lambda() -> None:
    found = length_adaptive_lambda(prefix([40, 200, 4], 200), alpha=0.05)
    assert found.tolist() == pytest.approx([0.5, 0.9, 0.0])


def test_overlong_penalty() -> None:
    lengths = torch.tensor([10, 60, 70, 80, 100, 120])
    found = overlong_penalty(lengths, longest=100, buffer=40)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "loss", "stuck"),
    [
        (1.25, 1.0, Clip(0.2), -1.2, True),
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


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    logp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0 - math.log(4), -1.0 + math.log(4)])
    advantage = torch.tensor([2.0, 2.0, 2.0])
    loss = weighted_policy_loss(logp, (logp - old).exp(), advantage, top=2.5)
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    assert grad.tolist() == pytest.approx([-2.0, -2.0 * 2.5, -2.0 * 0.25])


def test_ratios_of_tokens_and_responses() -> None:
    mask = prefix([3, 1], 3)
    log_ratio = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.0, 0.0]], requires_grad=True)
    values = {
        level: ratios(log_ratio, mask, level) for level in ("token", "sequence", "sequence_mean")
    }
    assert values["token"][0].tolist() == pytest.approx([math.exp(x) for x in (0.1, 0.2, 0.3)])
    assert values["sequence"][0].tolist() == pytest.approx([math.exp(0.6)] * 3)
    assert values["sequence_mean"][0].tolist() == pytest.approx([math.exp(0.2)] * 3)
    assert values["sequence_mean"][1, 0].item() == pytest.approx(math.exp(0.5))


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
    assert weights(level="sequence", high=5.0)[0] == pytest.approx([1.5, 1.5])
    mean = 1.5**0.5
    assert weights(level="sequence_mean", high=1.01)[0] == pytest.approx([1.01, 1.01])
    assert weights(level="sequence_mean", high=9.0)[0] == pytest.approx([mean, mean])
    assert weights(kind="mask", level="sequence_mean", high=1.01)[0] == [0.0, 0.0]
