"""Credit and loss of each algorithm, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.algorithms import BUILTIN, Algorithm, grpo, ppo, reinforce_pp, remax, rloo
from kedge.algorithms.transforms import penalize_overlong
from kedge.math.advantage import length_adaptive_lambda
from kedge.math.losses import Clip
from tests.unit.advantage_inputs import advantages, evidence, micro_batch, output, prefix

GROUP = [0, 0, 1, 1]
SCORES = [1.0, 3.0, 10.0, 4.0]
KL = [[0.1, 0.3], [0.2, 0.0], [0.0, 0.0], [-0.5, 0.5]]


def test_rloo_subtracts_the_kl_of_the_response_before_the_baseline() -> None:
    found = rloo().compute_advantages(evidence(SCORES, GROUP, kl=KL), 0.5)
    x = [1 - 0.2, 3 - 0.1, 10, 4]
    pairs = (x[0] - x[1], x[1] - x[0], x[2] - x[3], x[3] - x[2])
    assert advantages(found) == pytest.approx(pairs)
    assert found.rewards[0].tolist() == pytest.approx([-0.05, 1 - 0.15])
    assert found.kl is not None
    assert found.kl[0].tolist() == pytest.approx([0.1, 0.3])


def test_rloo_kl_per_token_is_charged_to_that_and_earlier_tokens() -> None:
    algorithm = rloo(token_level_kl=True)
    found = algorithm.compute_advantages(evidence(SCORES, GROUP, kl=KL), 0.5).advantages
    assert found[0].tolist() == pytest.approx([-2 - 0.2, -2 - 0.15])
    assert found[1].tolist() == pytest.approx([2 - 0.1, 2.0])
    assert found[3].tolist() == pytest.approx([-6.0, -6 - 0.25])


def test_rewards_are_normalized_and_clipped_each_on_its_own() -> None:
    batch = evidence([0.0, 100.0, None, 20.0], GROUP)
    mean, std = 40.0, (((-40) ** 2 + 60**2 + (-20) ** 2) / 2) ** 0.5 + 1e-4

    def first(**options: Any) -> float:
        return advantages(rloo(**options).compute_advantages(batch, 0.0))[0]

    assert first(reward_clip_range=30.0) == pytest.approx(-30)
    assert first(reward_clip_range=(10.0, 50.0)) == pytest.approx(10 - 50)
    assert first(normalize_reward=True) == pytest.approx(-100 / std)
    both = max(-0.5, (0 - mean) / std) - min(0.5, (100 - mean) / std)
    assert first(normalize_reward=True, reward_clip_range=0.5) == pytest.approx(both)


def test_advantages_are_normalized_over_all_ranks() -> None:
    """Two ranks, two groups each, against the same four groups on one rank."""
    scores = [1.0, 3, 10, 4, 2.5, 2.5, -7, 0]
    group = [0, 0, 1, 1, 2, 2, 3, 3]
    for algorithm in (
        rloo(normalize_advantage=True),
        rloo(normalize_reward=True),
        rloo(normalize_advantage=True, token_level_kl=True),
        reinforce_pp(),
        reinforce_pp(baseline=True, normalize_reward=True),
        grpo(scale_rewards="batch"),
    ):
        kl = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)) * 0.1
        sums: list[Tensor] = []

        def note(x: Tensor, sums: list[Tensor] = sums) -> Tensor:
            sums.append(x)
            return x

        whole = algorithm.compute_advantages(
            evidence(scores, group, kl=kl, all_reduce=note), 0.5
        ).advantages
        for own in (slice(0, 4), slice(4, 8)):
            coming = iter(sums)  # what both ranks together would find

            def all_reduce(x: Tensor, coming: Any = coming) -> Tensor:
                return next(coming)

            part = evidence(scores[own], group[own], kl=kl[own], all_reduce=all_reduce)
            found = algorithm.compute_advantages(part, 0.5).advantages
            torch.testing.assert_close(found, whole[own])


def test_rloo_weighs_whole_responses() -> None:
    algorithm = rloo(cliprange=0.2)
    mask = prefix([3, 1])
    old = torch.full((2, 3), -2.0) * mask
    step = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.0, 0.0]])
    logp = (old + step).requires_grad_()
    compute_advantages = torch.tensor([[-1.0], [2.0]]).expand(2, 3)
    found = algorithm.loss(
        output(logp, mask), micro_batch(algorithm, compute_advantages, mask, old=old)
    )
    want = 0.5 * math.exp(0.6) - 0.5 * 2 * math.exp(0.1)
    assert found.total.item() == pytest.approx(want)
    (grad,) = torch.autograd.grad(found.total, logp)
    a, b = 0.5 * math.exp(0.6), -math.exp(0.1)
    assert grad.tolist() == [pytest.approx([a, a, a]), pytest.approx([b, 0.0, 0.0])]
    assert found.metrics["val/ratio"].item() == pytest.approx((math.exp(0.6) + math.exp(0.1)) / 2)
    assert found.metrics["policy/clipfrac_avg"].item() == 0.0


def test_token_and_response_ratios_agree_at_ratio_1_and_clip_apart() -> None:
    mask = prefix([3, 1])
    old = torch.full((2, 3), -2.0) * mask
    compute_advantages = torch.tensor([[-1.0], [2.0]]).expand(2, 3)

    def gradient(algorithm: Algorithm, step: float) -> Tensor:
        logp = (old + step).requires_grad_()
        batch = micro_batch(algorithm, compute_advantages, mask, old=old)
        (grad,) = torch.autograd.grad(algorithm.loss(output(logp, mask), batch).total, logp)
        return grad

    token, whole = rloo(ratio_level="token"), rloo()
    torch.testing.assert_close(gradient(token, 0.0), gradient(whole, 0.0))
    # 0.1 per token is within the clip for a token, and 0.3 for three is not where A > 0.
    flipped = rloo(cliprange=0.15)
    assert gradient(flipped, 0.1)[1, 0].item() != 0
    compute_advantages = -compute_advantages
    assert gradient(flipped, 0.1)[0].tolist() == [0.0, 0.0, 0.0]
    assert gradient(rloo(cliprange=0.15, ratio_level="token"), 0.1)[0, 0].item() != 0


def test_reinforce_pp_sums_later_rewards_and_whitens_over_tokens() -> None:
    batch = evidence([1.0, 3.0], [0, 1], kl=[[0.2, 0.4], [0.0, 9.0]], lengths=[2, 1])
    raw = [1 - 0.5 * 0.6, 1 - 0.5 * 0.4, 3.0]
    plain = reinforce_pp(normalize_advantage=False).compute_advantages(batch, 0.5).advantages
    assert [*plain[0].tolist(), *plain[1].tolist()] == pytest.approx([*raw, 0.0])
    mean = sum(raw) / 3
    std = (sum((x - mean) ** 2 for x in raw) / 2) ** 0.5
    white = reinforce_pp().compute_advantages(batch, 0.5).advantages
    assert white[white != 0].tolist() == pytest.approx([(x - mean) / std for x in raw], abs=1e-5)
    batch = evidence([1.0, 1.0], [0, 1], lengths=[3, 3])
    discounted = reinforce_pp(gamma=0.5, normalize_advantage=False).compute_advantages(batch, 0.0)
    assert discounted.advantages[0].tolist() == [0.25, 0.5, 1.0]


def test_reinforce_pp_baseline_subtracts_the_mean_of_the_group_of_valid_rows() -> None:
    batch = evidence([1.0, None, 10.0, 4.0], GROUP)
    found = reinforce_pp(baseline=True, normalize_advantage=False).compute_advantages(batch, 0.0)
    assert advantages(found) == [0.0, 0.0, 3.0, -3.0]


def test_reinforce_pp_kl_in_the_loss() -> None:
    algorithm = reinforce_pp(beta=0.5)
    mask, old = prefix([1, 1]), torch.tensor([[-2.0], [-2.0]])
    ref = torch.tensor([[-2.5], [-1.0]])
    logp = old.clone().requires_grad_()
    batch = micro_batch(algorithm, torch.zeros(2, 1), mask, old=old, ref=ref)
    found = algorithm.loss(output(logp, mask), batch)
    kl = 0.5 * (0.5 * 0.5**2 + 0.5 * 1.0)
    assert found.metrics["loss/kl_avg"].item() == pytest.approx(kl)
    assert found.total.item() == pytest.approx(0.5 * kl)
    (grad,) = torch.autograd.grad(found.total, logp)
    assert grad.flatten().tolist() == pytest.approx([0.5 * 0.5 * 0.5, -0.5 * 0.5 * 1.0])


def test_grpo_weights_by_loss_type() -> None:
    mask = prefix([4, 1], 4)
    compute_advantages = torch.tensor([[1.0], [-3.0]]).expand(2, 4)
    zero = torch.zeros(2, 4)
    want = {
        "grpo": -0.5 * 1 + 0.5 * 3,
        "dapo": -0.2 * 4 + 0.2 * 3,
        "bnpo": -0.2 * 4 + 0.2 * 3,
        "dr_grpo": (-4 + 3) / (2 * 8),
    }
    for kind, loss in want.items():
        algorithm = grpo(loss_type=kind, response_length=8)  # type: ignore[arg-type]
        batch = micro_batch(algorithm, compute_advantages, mask, old=zero)
        found = algorithm.loss(output(zero, mask), batch)
        assert found.total.item() == pytest.approx(loss), kind


def loss_of(
    algorithm: Algorithm, step: float, advantage: float, **given: Any
) -> tuple[float, float]:
    """Loss and gradient of one token whose log-probability has moved by ``step``."""
    mask, old = prefix([1]), torch.tensor([[-2.0]])
    logp = (old + step).requires_grad_()
    batch = micro_batch(algorithm, torch.tensor([[advantage]]), mask, old=old, **given)
    found = algorithm.loss(output(logp, mask), batch).total
    (grad,) = torch.autograd.grad(found, logp)
    return found.item(), grad.item()


def test_grpo_clip_higher_and_two_sided() -> None:
    up = math.log(1.25)
    assert loss_of(grpo(), up, 1.0) == pytest.approx((-1.2, 0.0))
    assert loss_of(grpo(epsilon_high=0.28), up, 1.0) == pytest.approx((-1.25, -1.25))
    assert loss_of(grpo(), math.log(9), -1.0) == pytest.approx((9.0, 9.0))
    assert loss_of(grpo(delta=4.0), math.log(9), -1.0) == pytest.approx((4.0, 0.0))


def test_cispo_goes_on_learning_from_clipped_tokens() -> None:
    cispo = grpo(loss_type="cispo", epsilon_high=2.0)
    assert loss_of(cispo, math.log(9), 1.0)[1] == pytest.approx(-2.0)
    assert loss_of(cispo, math.log(1.5), 1.0)[1] == pytest.approx(-1.5)
    assert loss_of(cispo, math.log(0.1), 1.0)[1] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5))],
)
def test_grpo_kl_in_the_loss(estimator: str, value: float, slope: float) -> None:
    ref = torch.tensor([[-2.5]])
    found = loss_of(grpo(beta=0.1, kl_estimator=estimator), 0.0, 0.0, ref=ref)
    assert found == pytest.approx((0.1 * value, 0.1 * slope))
    # With the ratio in front, what is differentiated is an expectation under the old policy.
    weighed = loss_of(
        grpo(beta=0.1, kl_estimator=estimator, use_bias_correction_kl=True), 0.0, 0.0, ref=ref
    )
    assert weighed == pytest.approx((0.1 * value, 0.1 * (slope + value)))


def test_gspo_clips_the_geometric_mean_of_a_response() -> None:
    gspo = grpo(importance_sampling_level="sequence", epsilon=0.1, loss_type="grpo")
    mask = prefix([2, 2])
    old = torch.full((2, 2), -2.0)
    logp = (old + torch.tensor([[0.3, -0.2], [0.3, 0.1]])).requires_grad_()
    batch = micro_batch(gspo, torch.ones(2, 2), mask, old=old)
    found = gspo.loss(output(logp, mask), batch)
    first, second = math.exp(0.05), 1.1
    assert found.total.item() == pytest.approx(-(first + second) / 2)
    (grad,) = torch.autograd.grad(found.total, logp)
    assert grad[0].tolist() == pytest.approx([-first / 4, -first / 4])
    assert grad[1].tolist() == [0.0, 0.0]
    assert found.metrics["policy/clipfrac_avg"].item() == pytest.approx(0.5)


def test_grpo_overlong_responses_lose_score() -> None:
    algorithm = penalize_overlong(grpo(scale_rewards="none"), buffer=4, response_length=8)
    found = advantages(
        algorithm.compute_advantages(evidence([1.0, 1.0], [0, 0], lengths=[2, 6]), 0.0)
    )
    assert found == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grpo(loss_type="dr_grpo"), "response_length"),
        (lambda: penalize_overlong(grpo(), buffer=9, response_length=8), "overlong_buffer=9"),
        (lambda: grpo(delta=1.1), "delta=1.1"),
        (lambda: grpo(kl_estimator="k4"), "k4"),
        (lambda: rloo(token_level_kl=True, ratio_level="sequence"), "ratio_level='token'"),
        (lambda: rloo(token_level_kl=True, credit="turn"), "set token_level_kl=False"),
        (lambda: reinforce_pp(loss_kl_estimator="full"), "full"),
    ],
)
def test_options_that_cannot_work_are_named(make: Callable[[], Algorithm], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_remax_compares_with_the_greedy_response() -> None:
    batch = evidence(
        [1.0, None, 5.0],
        [0, 0, 1],
        kl=[[0.2, 0.4]] * 3,
        greedy_scores=torch.tensor([0.5, 0.5, 7.0]),
    )
    found = remax().compute_advantages(batch, 0.5).advantages
    assert found[0].tolist() == pytest.approx([0.5 - 0.3, 0.5 - 0.2])
    assert found[1].tolist() == [0.0, 0.0]
    assert found[2].tolist() == pytest.approx([-2 - 0.3, -2 - 0.2])
    assert remax().needs_greedy
    with pytest.raises(ValueError, match="needs_greedy=True"):
        remax().compute_advantages(evidence([1.0], [0]), 0.0)


def test_ppo_with_a_lambda_by_length() -> None:
    """alpha 0.5: lambda is 1 - 1 / (0.5 x 4) = 0.5 for four tokens and 0 for two."""
    values = [[1.0, 2.0, 4.0, 5.0], [1.0, 2.0, 0.0, 0.0]]
    batch = evidence([10.0, 10.0], [0, 1], lengths=[4, 2], values=values)
    plain = {"whiten_advantages": False}
    by_length = partial(length_adaptive_lambda, alpha=0.5)
    found = ppo(lam=by_length, **plain).compute_advantages(batch, 0.0)
    half = ppo(lam=0.5, **plain).compute_advantages(batch, 0.0).advantages
    none = ppo(lam=0.0, **plain).compute_advantages(batch, 0.0).advantages
    torch.testing.assert_close(found.advantages[0], half[0])
    torch.testing.assert_close(found.advantages[1], none[1])
    assert found.returns is not None
    assert found.returns[0].tolist() == [10.0] * 4  # lambda 1, as in VAPO


def test_ppo_dual_clip() -> None:
    for algorithm, loss in ((ppo(), 7.0), (ppo(cliprange=Clip(0.2, ceiling=3.0)), 3.0)):
        mask, old, zero = prefix([1]), torch.tensor([[-5.0]]), torch.zeros(1, 1)
        logp = (old + math.log(7)).requires_grad_()
        batch = micro_batch(algorithm, torch.tensor([[-1.0]]), mask, old=old)
        batch = replace(batch, rows=replace(batch.rows, old_values=zero, returns=zero))
        found = algorithm.loss(replace(output(logp, mask), values=zero), batch)
        (grad,) = torch.autograd.grad(found.parts["policy"], logp)
        assert found.parts["policy"].item() == pytest.approx(loss)
        assert grad.item() == pytest.approx(7.0 if loss == 7.0 else 0.0)
        assert found.metrics["policy/clipfrac_avg"].item() == float(loss != 7.0)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_order_of_rows_changes_nothing(name: str) -> None:
    g = torch.Generator().manual_seed(3)
    rows = 12
    scores: list[float | None] = torch.randn(rows, generator=g).tolist()
    scores[4] = None
    group = [0, 1, 2, 3] * 3
    kl = torch.randn(rows, 5, generator=g) * 0.1
    lengths = torch.randint(1, 6, (rows,), generator=g).tolist()
    lengths[0] = lengths[-1] = 5
    algorithm: Algorithm = BUILTIN[name]()

    def compute_advantages(order: list[int]) -> Any:
        batch = evidence(
            [scores[i] for i in order],
            [group[i] for i in order],
            kl=kl[order],
            lengths=[lengths[i] for i in order],
            values=kl[order] * 3,
            greedy_scores=torch.tensor(group)[order] * 0.1,
        )
        return algorithm.compute_advantages(batch, 0.3)

    order = torch.randperm(rows, generator=g).tolist()
    one, two = compute_advantages(list(range(rows))), compute_advantages(order)
    torch.testing.assert_close(two.advantages, one.advantages[order])
    torch.testing.assert_close(two.rewards, one.rewards[order])
    assert one.advantages[4].abs().sum() == 0
