"""Rows of the N+ checklist (arXiv:2403.17031) that concern PPO; docs/trust/nplus.md lists them.

Rows on sampling are in test_nplus_rollouts.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.algorithms import ppo
from kedge.loop.control import AdaptiveKL
from kedge.types import PromptBatch, Rollout
from tests.e2e.small import VOCAB, rows, small
from tests.reference.nplus_inputs import LENGTHS, evidence, experience
from tests.unit.text_toys import EOS, neox_reward, word_tokenizer


def test_row_03_queries_are_left_padded() -> None:
    batch = small().engine.source.batch(0)
    lengths = batch.mask.sum(1)
    assert len(set(lengths.tolist())) > 1
    assert batch.mask[:, -1].all()
    assert not batch.mask[lengths.argmin(), 0]


def test_row_04_pad_may_equal_eos_for_masks_come_from_lengths() -> None:
    ends = {}
    for name, tokenizer in {"own": word_tokenizer(), "eos": word_tokenizer(pad=False)}.items():
        trainer = small(processing_class=tokenizer)
        trainer.train()
        ends[name] = trainer.model.state_dict()
    assert all(torch.equal(x, ends["eos"][name]) for name, x in ends["own"].items())


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


def test_row_11_optimizer_and_its_epsilon() -> None:
    trainer = small(adam_epsilon=1e-5, learning_rate=3e-6)
    group = trainer.optimizer.param_groups[0]
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert (group["eps"], group["lr"], group["betas"]) == (1e-5, 3e-6, (0.9, 0.999))


def test_row_13_linear_schedule_to_zero() -> None:
    trainer = small(total_episodes=16, learning_rate=4e-3)
    trainer.train()
    assert [row["lr"] for row in rows(trainer)] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])


def test_row_14_a_row_draws_the_same_on_any_rank() -> None:
    from kedge.rollout.embedded.sampling import uniforms

    whole = uniforms(7, torch.arange(8), 3)
    assert torch.equal(torch.cat([uniforms(7, torch.arange(4), 3), whole[4:]]), whole)
    assert len(set(whole.tolist())) == 8


@pytest.mark.parametrize("finished", [True, False])
def test_row_16_17_30_the_score_is_that_of_the_last_real_token(finished: bool) -> None:
    from kedge.rewards import reward_source

    model = neox_reward(vocab=VOCAB)
    source = reward_source(model, policy_tokenizer=word_tokenizer())
    ids = torch.tensor([[5, 6, 0, 9, 9]])
    present = torch.arange(5) < (3 if finished else 5)
    e = evidence()
    prompts = PromptBatch(
        ids=torch.tensor([[1, 7, 8]]),
        mask=torch.tensor([[False, True, True]]),
        group=torch.zeros(1, dtype=torch.long),
        row=torch.zeros(1, dtype=torch.long),
    )
    rollout = Rollout(
        prompts=prompts,
        ids=ids,
        loss_mask=present[None],
        response_mask=present[None],
        terminated=torch.tensor([finished]),
        version=e.rollout.version[:1],
    )
    seen = torch.tensor([[7, 8, 5, 6, 0] if finished else [7, 8, 5, 6, 0, 9, 9]])
    with torch.no_grad():
        hidden = model.eval().gpt_neox(seen).last_hidden_state[0, -1]
        want = float(model.score(hidden))
    assert float(source.score(rollout).scores) == pytest.approx(want, abs=1e-5)


def test_row_31_the_eos_trick_replaces_or_subtracts() -> None:
    plain, subtracted, replaced = (
        small(total_episodes=16, per_device_train_batch_size=16, response_length=6, **options)
        for options in (
            {},
            {"missing_eos_penalty": 1.5},
            {"non_eos_penalty": True, "penalty_reward_value": -7.0},
        )
    )
    for trainer in (plain, subtracted, replaced):
        trainer.train()
    (a,), (b,), (c,) = rows(plain), rows(subtracted), rows(replaced)
    cut = a["completions/truncated_ratio"]
    assert 0 < cut < 1
    assert b["objective/scores"] == pytest.approx(a["objective/scores"] - 1.5 * cut, abs=1e-5)
    kept = small(
        total_episodes=16,
        per_device_train_batch_size=16,
        response_length=6,
        reward_model=None,
        reward_funcs=lambda completions, **_: [2.0] * len(completions),
        non_eos_penalty=True,
        penalty_reward_value=-7.0,
    )
    kept.train()
    assert rows(kept)[0]["objective/scores"] == pytest.approx(2.0 * (1 - cut) - 7.0 * cut)
    assert c["objective/scores"] < a["objective/scores"]


def test_row_33_34_masks_of_policy_and_value() -> None:
    e = evidence()
    advantage_output = ppo(score_position="after_last").compute_advantages(e, 0.05)
    assert advantage_output.value_mask is not None
    # one more slot where there is room
    assert advantage_output.value_mask.sum(1).tolist() == [4, 5, 2, 5]
    assert e.rollout.loss_mask.sum(1).tolist() == LENGTHS
    assert ppo().compute_advantages(e, 0.05).value_mask.sum(1).tolist() == LENGTHS  # type: ignore[union-attr]


def test_row_38_43_the_value_starts_from_the_reward_model_and_is_a_model_of_its_own() -> None:
    reward = neox_reward(vocab=VOCAB)
    trainer = small(reward_model=reward)
    value = trainer.value_model
    assert value is not None
    assert value is not reward
    assert all(
        torch.equal(p, q) for p, q in zip(value.parameters(), reward.parameters(), strict=True)
    )
    trainer.train()
    assert any(
        not torch.equal(p, q) for p, q in zip(value.parameters(), reward.parameters(), strict=True)
    )
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


def test_row_48_adaptive_kl() -> None:
    control = AdaptiveKL(value=0.15, target=6.0, horizon=10_000.0)
    control.update(12.0, 512)  # 100% over, clipped to 20%
    assert control.value == pytest.approx(0.15 * (1 + 0.2 * 512 / 10_000))
    control.update(5.4, 512)  # 10% under
    assert control.value == pytest.approx(
        0.15 * (1 + 0.2 * 512 / 10_000) * (1 - 0.1 * 512 / 10_000)
    )
