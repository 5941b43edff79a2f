"""The gradient of an optimizer step is a property of its rows: not of how they were cut or padded.

Each property comes with a broken way of computing that must be seen.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kedge.algorithms import grpo, ppo, reinforce_pp, remax, rloo
from kedge.algorithms.transforms import divide_by_length
from kedge.loop.stages import micro_batches
from kedge.math.losses import RatioMask
from tests.learners import experience, gradient, learner, rollout

ROWS = 6
ALGORITHM = ppo(vf_coef=0.5)
QUICK = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def batch(**how):
    return experience(rollout(ROWS, **how))


def same(a, b, tolerance=2e-5):
    return float((a - b).norm()) <= tolerance * float(a.norm())


@pytest.fixture(scope="module")
def whole():
    return gradient(batch(), ALGORITHM)


@QUICK
@given(
    micro_rows=st.integers(1, ROWS),
    padding=st.integers(0, 20),
    order=st.permutations(range(ROWS)),
    spare=st.none() | st.integers(0, 50),
)
def test_micro_batches_padding_order_and_groups_by_length(whole, micro_rows, padding, order, spare):
    vector, metrics = gradient(
        batch(extra_padding=padding),
        ALGORITHM,
        micro_rows=micro_rows,
        order=torch.tensor(order),
        make=lambda: learner(padding_budget=spare),
    )
    assert same(whole[0], vector)
    assert metrics == pytest.approx(whole[1], rel=1e-4, abs=1e-6)


OTHERS = [
    replace(ppo(cliprange=RatioMask(0.05, 0.05)), weighting="row_then_token_mean"),
    divide_by_length(ppo(cliprange=0.05), response_length=50),
    *(rloo(), rloo(ratio_level="token"), reinforce_pp(ratio_level="sequence", beta=0.1), remax()),
    *(
        grpo(loss_type=x, response_length=50, beta=0.1)
        for x in ("grpo", "dapo", "dr_grpo", "cispo")
    ),
    grpo(importance_sampling_level="sequence", beta=0.1, use_bias_correction_kl=True),
]


@pytest.mark.parametrize("algorithm", OTHERS)
def test_micro_batches_of_other_losses(algorithm):
    data = batch()
    data = replace(
        data,
        ref_logprobs=data.old_logprobs - 0.1 * data.rewards,
    )
    mixed = torch.tensor([3, 5, 0, 2, 1, 4])
    one, _ = gradient(data, algorithm)
    other, _ = gradient(data, algorithm, micro_rows=2, order=mixed)
    assert same(one, other)


@QUICK
@given(dropped=st.integers(0, ROWS - 1))
def test_rows_without_loss_change_nothing(dropped):
    full = batch()
    empty = {name: getattr(full, name).clone() for name in ("loss_mask", "value_mask")}
    for mask in empty.values():
        mask[dropped] = False
    kept = torch.tensor([i for i in range(ROWS) if i != dropped])
    with_row, _ = gradient(replace(full, **empty), ALGORITHM, micro_rows=2)
    without, _ = gradient(full.rows(kept), ALGORITHM, micro_rows=2)
    assert same(with_row, without)


def mean_of_means(experience, index, algorithm, micro_rows, total):
    """Broken: every micro-batch is averaged by itself, then the averages are."""
    parts = list(micro_batches(experience, index, algorithm, micro_rows, total))
    for part in parts:
        token = part.token_weight / part.token_weight.sum().clamp(min=1e-9) / len(parts)
        value = part.value_weight / part.value_weight.sum().clamp(min=1e-9) / len(parts)
        yield replace(part, token_weight=token, value_weight=value)


def mean_over_slots(experience, index, algorithm, micro_rows, total):
    """Broken: padding counts in the mean."""
    for part in micro_batches(experience, index, algorithm, micro_rows, total):
        weight = part.rows.loss_mask / (experience.loss_mask.numel() / len(experience) * len(index))
        yield replace(part, token_weight=weight)


def shifted(experience, index, algorithm, micro_rows, total):
    """Broken: rows keep the weights of the order they came in, not of the order they are in."""
    parts = list(micro_batches(experience, index, algorithm, micro_rows, total))
    weights = [p.token_weight.flip(0) * torch.arange(1, len(p.rows) + 1)[:, None] for p in parts]
    return [replace(p, token_weight=w) for p, w in zip(parts, weights, strict=True)]


def careless(experience, index, algorithm, micro_rows, total):
    """Broken: left padding is taken for tokens."""
    for part in micro_batches(experience, index, algorithm, micro_rows, total):
        everything = torch.ones_like(part.rows.prompt_mask)
        yield replace(part, rows=replace(part.rows, prompt_mask=everything))


@pytest.mark.parametrize(
    ("split", "extra_padding", "micro_rows"),
    [(mean_of_means, 0, 2), (mean_over_slots, 9, ROWS), (shifted, 0, 3), (careless, 9, ROWS)],
)
def test_broken_ways_are_seen(split, extra_padding, micro_rows):
    a, _ = gradient(batch(), ALGORITHM, split=split, micro_rows=ROWS)
    other = batch(extra_padding=extra_padding)
    b, _ = gradient(other, ALGORITHM, split=split, micro_rows=micro_rows)
    assert not same(a, b, 1e-2)
