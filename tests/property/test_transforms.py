"""Transforms on a user's algorithm and on ours, against float64, each with a broken variant."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from kedge.algorithms import Algorithm, grpo, ppo, reinforce_pp, rloo
from kedge.algorithms.transforms import (
    divide_by_length,
    divide_scores,
    drop_uniform_groups,
    mask_truncated,
    penalize_overlong,
    resample_uniform_groups,
)
from kedge.records.types import AdvantageOutput, Loss
from tests.unit.advantage_inputs import evidence, micro_batch, output

LENGTHS = [2, 4, 3, 3, 1, 5, 5]
SCORES = [1.0, 3.0, 2.0, 2.0, 4.0, 2.5, None]
GROUP = [0, 0, 1, 1, 2, 2, 2]
FINISHED = [True, True, True, True, True, False, True]


def own():
    """What a user writes: one score per response, centered over the tokens that train."""

    def compute_advantages(e, kl_coef):
        scores = e.reward_output.scores[:, None].expand(e.trained.shape)
        centered = (scores - scores[e.trained].mean()).nan_to_num() * e.rollout.loss_mask
        return AdvantageOutput(rewards=centered, advantages=centered)

    def loss(new, mb):
        ratio = ((new.logprobs - mb.rows.old_logprobs) * mb.rows.loss_mask).exp()
        return Loss(parts={"policy": -(mb.token_weight * ratio * mb.rows.advantages).sum()})

    return Algorithm(name="own", compute_advantages=compute_advantages, loss=loss)


def inputs(**changes):
    g = torch.Generator().manual_seed(0)
    values = torch.randn(len(SCORES), max(LENGTHS), generator=g)
    e = evidence(
        SCORES, GROUP, lengths=LENGTHS, finished=FINISHED, values=values, kl=0.1 * values, **changes
    )
    logprobs = 3 * torch.randn(values.shape, generator=g)
    return replace(e, model_outputs=replace(e.model_outputs, logprobs=logprobs))


def overlong(algorithm):
    return penalize_overlong(algorithm, buffer=3, response_length=5)


OURS = {
    "own": own,
    "ppo": ppo,
    "ppo by turn": lambda: ppo(credit="turn"),
    "grpo": grpo,
    "rloo": lambda: rloo(normalize_advantage=True),
    "reinforce_pp": reinforce_pp,
}


def tensors(out):
    names = ("rewards", "advantages", "returns", "loss_mask", "value_mask")
    return {n: x for n in names if (x := getattr(out, n)) is not None}


@pytest.mark.parametrize("name", OURS)
def test_filters_and_penalties_of_scores_in_any_order_are_the_same(name):
    """Broken: a penalty that the filter of uniform groups does not see."""
    outs = []
    for order in permutations([overlong, mask_truncated, drop_uniform_groups]):
        algorithm = OURS[name]()
        for transform in order:
            algorithm = transform(algorithm)
        outs.append(tensors(algorithm.compute_advantages(inputs(), 0.1)))
    for out in outs[1:]:
        assert out.keys() == outs[0].keys()
        assert all(torch.equal(out[n], x) for n, x in outs[0].items())
    # Rows 2 and 3 have equal scores and lengths, row 5 is truncated, row 6 has no score.
    assert outs[0]["loss_mask"].any(1).tolist() == [True, True, False, False, True, False, False]
    if name.startswith("ppo"):  # uniform groups train the value model
        assert outs[0]["value_mask"].any(1).tolist() == [True] * 5 + [False] * 2

    # Equal scores of responses of 2 and 4 tokens: the penalty tells them apart.
    e = inputs()
    equal = replace(e, reward_output=replace(e.reward_output, scores=torch.full((7,), 2.0)))
    blind = replace(overlong(OURS[name]()), uniform=OURS[name]().uniform)
    for algorithm, kept in ((overlong(OURS[name]()), True), (blind, False)):
        out = drop_uniform_groups(algorithm).compute_advantages(equal, 0.0)
        assert out.loss_mask.any(1).tolist()[:2] == [kept, kept]


@pytest.mark.parametrize("broken", [False, True])
def test_statistics_are_those_of_the_kept_tokens(broken):
    """Broken: a filter that only takes rows out of the loss."""
    plain = own()

    def cut(e, kl_coef):
        out = plain.compute_advantages(e, kl_coef)
        return replace(out, loss_mask=e.rollout.loss_mask & e.rollout.terminated[:, None])

    algorithm = replace(plain, compute_advantages=cut) if broken else mask_truncated(plain)
    out = algorithm.compute_advantages(inputs(), 0.0)
    kept = [(s, n) for s, n, done in zip(SCORES, LENGTHS, FINISHED, strict=True) if s and done]
    mean = sum(s * n for s, n in kept) / sum(n for _, n in kept)
    found = out.advantages[out.loss_mask.any(1), 0].double()
    expected = torch.tensor([s - mean for s, _ in kept]).double()
    assert torch.allclose(found, expected, atol=1e-6) is not broken


@pytest.mark.parametrize("name", OURS)
def test_scores_that_are_divided_give_the_advantages_of_smaller_scores(name):
    e = inputs()
    smaller = replace(e, reward_output=e.reward_output.divide(4.0))
    found = divide_scores(OURS[name](), 4.0).compute_advantages(e, 0.1)
    want = tensors(OURS[name]().compute_advantages(smaller, 0.1))
    assert all(torch.equal(tensors(found)[n], x) for n, x in want.items())


@pytest.mark.parametrize("weighting", ["token_mean", "row_then_token_mean"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_constant_length_divides_the_policy_loss(weighting, broken):
    """Broken: the mean over tokens."""
    e = inputs()
    mask = e.rollout.loss_mask
    g = torch.Generator().manual_seed(1)
    new, old, advantages = torch.randn(3, *mask.shape, generator=g)
    plain = replace(own(), weighting=weighting)
    algorithm = plain if broken else divide_by_length(plain, response_length=9)
    mb = micro_batch(algorithm, advantages, mask, old=old * mask)
    found = float(algorithm.loss(output(new, mask), mb).total)
    ratios = (new - old).double().exp()
    expected = -float((ratios * advantages)[mask].sum()) / (9 * 6)  # six rows have a score
    assert (abs(found - expected) < 1e-5) is not broken


def test_groups_that_are_dropped_or_resampled_need_two_responses():
    assert drop_uniform_groups(own()).min_group == 2
    resampled = resample_uniform_groups(ppo(), rounds=3)
    assert (resampled.resample, resampled.min_group, ppo().min_group) == (3, 2, 1)
