"""The N+ details of PPO (arXiv:2403.17031), from returns to losses and statistics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.algorithms import ppo
from kedge.loop.kl_control import AdaptiveKL
from kedge.math.advantage import gae
from kedge.math.masked import extend, whiten
from kedge.types import PolicyOutput
from tests.e2e.small import PROMPTS, small
from tests.reference.nplus_inputs import LENGTHS, evidence, experience


def test_row_40_returns_are_advantages_before_whitening_plus_values() -> None:
    e = evidence()
    advantage_output = ppo(gamma=1.0, lam=0.95).compute_advantages(e, 0.05)
    values: Tensor = e.model_outputs.values  # type: ignore[assignment]
    raw = gae(advantage_output.rewards, values, e.rollout.loss_mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantage_output.returns, (raw + values) * e.rollout.loss_mask)
    torch.testing.assert_close(advantage_output.advantages, whiten(raw, e.rollout.loss_mask))


def test_row_41_reward_whitening_keeps_the_mean() -> None:
    e = evidence()
    plain = ppo().compute_advantages(e, 0.05).rewards[e.rollout.loss_mask]
    white = ppo(whiten_rewards=True).compute_advantages(e, 0.05).rewards[e.rollout.loss_mask]
    assert float(white.mean()) == pytest.approx(float(plain.mean()), abs=1e-5)
    assert float(white.std()) == pytest.approx(1.0, abs=1e-4)


def test_row_42_advantages_are_whitened_over_real_tokens() -> None:
    e = evidence()
    got = ppo().compute_advantages(e, 0.05).advantages
    kept = got[e.rollout.loss_mask]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(kept.std()) == pytest.approx(1.0, abs=1e-4)
    assert float(got[~e.rollout.loss_mask].abs().sum()) == 0.0


def test_row_44_45_clipped_losses_over_their_masks() -> None:
    e = evidence()
    rule = ppo(cliprange=0.2, cliprange_value=0.2, vf_coef=0.1)
    mb = experience(e, rule.compute_advantages(e, 0.05))
    g = torch.Generator().manual_seed(1)
    new = PolicyOutput(
        logprobs=e.model_outputs.logprobs + 0.5 * torch.randn(4, 5, generator=g),
        entropy=torch.zeros(4, 5),
        values=e.model_outputs.values + torch.randn(4, 5, generator=g),  # type: ignore[operator]
    )
    loss, x, policy, value = rule.loss(new, mb), mb.rows, [], []
    for i, n in enumerate(LENGTHS):
        for t in range(n):
            a, ratio = (
                float(x.advantages[i, t]),
                math.exp(float(new.logprobs[i, t] - x.old_logprobs[i, t])),
            )
            policy.append(max(-a * ratio, -a * min(max(ratio, 0.8), 1.2)))
            v, old, ret = (float(y[i, t]) for y in (new.values, x.old_values, x.returns))  # type: ignore[index]
            near = min(max(v, old - 0.2), old + 0.2)
            value.append(0.5 * max((v - ret) ** 2, (near - ret) ** 2))
    assert float(loss.parts["policy"]) == pytest.approx(sum(policy) / len(policy), rel=1e-5)
    assert float(loss.parts["value"]) == pytest.approx(0.1 * sum(value) / len(value), rel=1e-5)


def test_row_46_four_passes_in_fresh_order_and_one_normalizer() -> None:
    from kedge.loop import stages

    seen: list[list[int]] = []

    class Watch:
        version, rank, world_size, shares_prompts = 0, 0, 1, False

        def total(self, x: Tensor) -> Tensor:
            return x

        def optimizer_step(self, step: Any, loss: Any, **options: Any) -> dict[str, float]:
            parts = list(step)
            seen.append([int(r) for mb in parts for r in mb.rows.prompt_ids[:, 0]])
            weights = sum(float(mb.token_weight.sum()) for mb in parts)
            assert weights == pytest.approx(1.0)  # over the whole step, whatever the cut
            return {"val/ratio": 1.0}

    e = evidence()
    mb = experience(e, ppo().compute_advantages(e, 0.05))
    named = replace(mb.rows, prompt_ids=torch.arange(4)[:, None])
    stages.optimize(
        named,
        Watch(),
        ppo(),
        epochs=4,
        minibatches=2,
        micro_rows=1,
        seed=3,  # type: ignore[arg-type]
    )
    assert len(seen) == 8
    passes = [sorted(seen[i] + seen[i + 1]) for i in range(0, 8, 2)]
    assert passes == [[0, 1, 2, 3]] * 4
    assert len({tuple(sorted(step)) for step in seen[::2]}) > 1


def test_row_47_prompts_repeat_reshuffled() -> None:
    source = small(per_device_train_batch_size=len(PROMPTS), total_episodes=26).engine.source
    first, second = (source.batch(i).columns["prompt"] for i in range(2))
    assert sorted(first) == sorted(second)  # type: ignore[type-var]
    assert first != second


def test_row_48_adaptive_kl() -> None:
    control = AdaptiveKL(value=0.15, target=6.0, horizon=10_000.0)
    control.update(12.0, 512)  # 100% over, clipped to 20%
    assert control.value == pytest.approx(0.15 * (1 + 0.2 * 512 / 10_000))
    control.update(5.4, 512)  # 10% under
    assert control.value == pytest.approx(
        0.15 * (1 + 0.2 * 512 / 10_000) * (1 - 0.1 * 512 / 10_000)
    )


def test_row_50_statistics() -> None:
    e = evidence()
    rule = ppo()
    mb = experience(e, rule.compute_advantages(e, 0.05))
    new = PolicyOutput(
        logprobs=e.model_outputs.logprobs + 0.2,
        entropy=torch.full((4, 5), 2.0),
        values=e.model_outputs.values,
    )
    metrics = rule.loss(new, mb).metrics
    assert float(metrics["policy/approxkl_avg"]) == pytest.approx(0.5 * 0.2**2, rel=1e-4)
    assert float(metrics["policy/entropy_avg"]) == pytest.approx(2.0)


def test_extend_is_the_reference_mask_plus_one() -> None:
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    length = torch.tensor(LENGTHS)[:, None] - 1
    assert torch.equal(extend(mask), ~(torch.arange(5) > length + 1))
