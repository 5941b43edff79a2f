"""Tokens of several policy versions in one response: anchors, weights, bound and metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kedge.algorithms import ppo
from kedge.loop.batch_metrics import _token_ages
from kedge.math.ratios import Correction
from kedge.records.types import RewardOutput, Rollout
from tests.learners import with_metrics
from tests.unit.advantage_inputs import rollout

from .toys import VOCAB, ToyLearner, prefix

VERSIONS = [[2, 3, 4], [4, 4, -1], [-1, -1, -1]]  # the last row: unknown, so that of the row
CURRENT = -math.log(VOCAB)  # of every token, by a learner whose logits are 0


def sample() -> tuple[Rollout, RewardOutput, ToyLearner]:
    mask = prefix([3, 2, 3], 3)
    responses = rollout(
        mask,
        policy_version=torch.tensor([2, 4, 3]),
        behavior_logprobs=torch.full((3, 3), CURRENT - 0.1) * mask,
        token_version=torch.tensor(VERSIONS),
    )
    valid = torch.ones(3, dtype=torch.bool)
    learner = ToyLearner()
    learner.version = 4
    return responses, RewardOutput(scores=torch.tensor([1.0, 2.0, 4.0]), valid=valid), learner


def close(x: Tensor, want: list[list[float]]) -> None:
    torch.testing.assert_close(x, torch.tensor(want), rtol=0, atol=1e-6)


def test_the_version_of_a_row_stands_for_tokens_without_one() -> None:
    responses, *_ = sample()
    assert responses.token_versions.tolist() == [[2, 3, 4], [4, 4, 4], [3, 3, 3]]
    assert replace(responses, token_version=None).token_versions.tolist() == [
        [2, 2, 2],
        [4, 4, 4],
        [3, 3, 3],
    ]
    both = Rollout.cat([responses, replace(responses, token_version=None)])
    assert both.token_versions[3:].tolist() == [[2, 2, 2], [4, 4, 4], [3, 3, 3]]


def test_the_anchor_of_a_stale_token_is_the_policy_that_sampled_it() -> None:
    responses, reward_output, learner = sample()
    experience, metrics = with_metrics(responses, reward_output, learner, ppo(), 0.0)
    assert metrics["rollout/stale_gap"] == pytest.approx(0.1, rel=1e-4)
    stale, fresh = CURRENT - 0.1, CURRENT
    anchors = experience.old_logprobs
    close(anchors, [[stale, stale, fresh], [fresh, fresh, anchors[1, 2].item()], [stale] * 3])


def test_weights_of_responses_are_those_of_the_tokens_that_train() -> None:
    responses, reward_output, learner = sample()
    how = Correction(level="sequence", high=5.0)
    _, all_train = with_metrics(responses, reward_output, learner, ppo(), 0.0, how)
    _, bound = with_metrics(responses, reward_output, learner, ppo(), 0.0, how, 1)
    # Weights e^(0.1 n) of n tokens: rows of 3, 2 and 3 tokens, the first of which is too old.
    expected = [(3, 3), (2, 2), (3, 3)], [(2, 2), (2, 2), (3, 3)]
    for metrics, rows in zip((all_train, bound), expected, strict=True):
        mean = sum(n * math.exp(0.1 * k) for n, k in rows) / sum(n for n, _ in rows)
        assert metrics["rollout/correction_weight"] == pytest.approx(mean, rel=1e-5)


def test_metrics_have_the_largest_age_and_the_share_of_each() -> None:
    responses, reward_output, learner = sample()
    _, metrics = with_metrics(responses, reward_output, learner, ppo(), 0.0)
    # Ages of the eight tokens: 2, 1, 0; 0, 0; 1, 1, 1.
    assert metrics["rollout/lag_max"] == 2
    assert metrics["rollout/token_lag/0"] == pytest.approx(3 / 8)
    assert metrics["rollout/token_lag/1"] == pytest.approx(4 / 8)
    assert metrics["rollout/token_lag/2"] == pytest.approx(1 / 8)
    assert metrics["rollout/lag"] == pytest.approx((2 + 0 + 1) / 3)
    _, metrics = with_metrics(responses, reward_output, learner, ppo(), 0.0, None, 1)
    assert metrics["rollout/lag_max"] == 1  # of the tokens that are trained on
    assert metrics["rollout/token_lag/1"] == pytest.approx(4 / 7)
    of_one_age = replace(responses, policy_version=torch.full((3,), 4), token_version=None)
    _, metrics = with_metrics(of_one_age, reward_output, learner, ppo(), 0.0)
    assert metrics["rollout/lag_max"] == 0
    assert not any(name.startswith("rollout/token_lag/") for name in metrics)
    other = iter([torch.tensor(3.0), torch.tensor([0.0, 0, 0, 1, 0])])  # a rank with age 3
    of_ranks = _token_ages(torch.tensor([1]), torch.tensor([True]), lambda x: x + next(other))
    assert of_ranks["rollout/lag_max"] == 3
