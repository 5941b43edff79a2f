"""Rows of the N+ checklist (arXiv:2403.17031) without a test elsewhere; see docs/trust/nplus.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.algorithms import ppo
from kedge.loop.control import AdaptiveKL
from tests.e2e.small import VOCAB, rows, small
from tests.learners import experience, rollout
from tests.unit.advantage_inputs import evidence
from tests.unit.text_toys import EOS, neox_reward


def test_row_10_no_dropout_anywhere() -> None:
    from kedge.testing import tiny_policy

    plain = small(total_episodes=8)
    plain.train()
    dropping = small(
        total_episodes=8,
        model=tiny_policy(
            "gpt_neox",
            vocab_size=VOCAB,
            eos_token_id=EOS,
            hidden_dropout=0.5,
            attention_dropout=0.5,
        ),
        reward_model=neox_reward(vocab=VOCAB, hidden_dropout=0.5, classifier_dropout=0.5),
    )
    dropping.train()
    assert rows(plain)[1]["loss/policy_avg"] == rows(dropping)[1]["loss/policy_avg"]


def test_row_33_34_masks_of_policy_and_value() -> None:
    lengths = [3, 5, 1, 4]
    e = evidence([1.0, -2.0, 0.5, 3.0], [0, 1, 2, 3], lengths=lengths, values=torch.zeros(4, 5))
    late, plain = (
        ppo(score_position=p).compute_advantages(e, 0.05) for p in ("after_last", "last")
    )
    assert late.value_mask.sum(1).tolist() == [4, 5, 2, 5]  # one more slot where there is room
    assert e.rollout.loss_mask.sum(1).tolist() == plain.value_mask.sum(1).tolist() == lengths


def test_row_38_43_the_value_starts_from_the_reward_model_and_is_a_model_of_its_own() -> None:
    reward = neox_reward(vocab=VOCAB)
    trainer = small(reward_model=reward)
    value = trainer.value_model
    assert value is not None
    assert value is not reward
    assert all(map(torch.equal, value.parameters(), reward.parameters()))
    trainer.train()
    assert not all(map(torch.equal, value.parameters(), reward.parameters()))
    names = {group["name"] for group in trainer.optimizer.param_groups}
    assert names == {"policy", "value"}  # one optimizer over both


def test_row_46_four_passes_in_fresh_order_and_one_normalizer() -> None:
    from kedge.loop import stages

    seen: list[list[int]] = []

    class Watch:
        version, rank, world_size, shares_prompts = 0, 0, 1, False

        def all_reduce(self, x: Tensor) -> Tensor:
            return x

        def optimizer_step(self, step: Any, loss: Any, **options: Any) -> dict[str, float]:
            parts = list(step)
            seen.append([int(r) for mb in parts for r in mb.rows.prompt_ids[:, 0]])
            weights = sum(float(mb.token_weight.sum()) for mb in parts)
            assert weights == pytest.approx(1.0)  # over the whole step, whatever the cut
            return {"val/ratio": 1.0}

    rows = replace(experience(rollout(4)), prompt_ids=torch.arange(4)[:, None])
    plan = stages.EpochPlan(epochs=4, minibatches=2, micro_rows=1, seed=3)
    stages.optimize(rows, Watch(), ppo(), plan)
    assert len(seen) == 8
    passes = [sorted(seen[i] + seen[i + 1]) for i in range(0, 8, 2)]
    assert passes == [[0, 1, 2, 3]] * 4
    assert len({tuple(sorted(step)) for step in seen[::2]}) > 1


def test_row_48_adaptive_kl() -> None:
    control = AdaptiveKL(value=0.15, target=6.0, horizon=10_000.0)
    control.update(12.0, 512)  # 100% over, clipped to 20%
    assert control.value == pytest.approx(0.15 * (1 + 0.2 * 512 / 10_000))
    control.update(5.4, 512)  # 10% under
    assert control.value == pytest.approx(
        0.15 * (1 + 0.2 * 512 / 10_000) * (1 - 0.1 * 512 / 10_000)
    )
