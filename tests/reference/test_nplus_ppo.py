"""Rows of the N+ checklist (arXiv:2403.17031) that concern PPO; docs/trust/nplus.md lists them.

Rows on sampling are in test_nplus_rollouts.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.algorithms import AdvantageInputs, ppo
from kedge.engine.kl_control import AdaptiveKL
from kedge.math.advantage import gae
from kedge.math.masked import extend, whiten
from kedge.types import (
    Experience,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    PromptBatch,
    RewardOutput,
    Rollout,
)
from tests.e2e.small import PROMPTS, VOCAB, rows, small
from tests.unit.text_toys import EOS, neox_reward, word_tokenizer

LENGTHS = [3, 5, 1, 4]


def evidence(**annotation: Tensor) -> AdvantageInputs:
    """Four responses of 3, 5, 1 and 4 tokens in 5 slots; the second was cut off."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    shape = mask.shape
    prompts = PromptBatch(
        ids=torch.ones(4, 2, dtype=torch.long),
        mask=torch.ones(4, 2, dtype=torch.bool),
        group=torch.arange(4),
        row=torch.arange(4),
    )
    rollout = Rollout(
        prompts=prompts,
        ids=torch.ones(shape, dtype=torch.long),
        loss_mask=mask,
        response_mask=mask,
        terminated=torch.tensor([True, False, True, True]),
        version=torch.zeros(4, dtype=torch.long),
    )
    note = {
        "logprobs": torch.randn(shape, generator=g),
        "ref_logprobs": torch.randn(shape, generator=g),
        "values": torch.randn(shape, generator=g),
    } | annotation
    judged = RewardOutput(
        scores=torch.tensor([1.0, -2.0, 0.5, 3.0]), valid=torch.ones(4, dtype=torch.bool)
    )
    return AdvantageInputs(
        rollout=rollout, reward_output=judged, model_outputs=ModelOutputs(**note)
    )


def experience(e: AdvantageInputs, advantage_output: Any) -> MicroBatch:
    x = Experience(
        prompt_ids=e.rollout.prompts.ids,
        prompt_mask=e.rollout.prompts.mask,
        ids=e.rollout.ids,
        loss_mask=e.rollout.loss_mask,
        response_mask=e.rollout.response_mask,
        value_mask=advantage_output.value_mask,
        old_logprobs=e.model_outputs.logprobs,
        rewards=advantage_output.rewards,
        advantages=advantage_output.advantages,
        old_values=e.model_outputs.values,
        returns=advantage_output.returns,
    )
    mask, spare = x.loss_mask.float(), x.value_mask.float()
    alive = x.loss_mask.any(1).float()
    return MicroBatch(
        rows=x,
        token_weight=mask / mask.sum(),
        value_weight=spare / spare.sum(),
        row_weight=alive / alive.sum(),
    )


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
    from kedge.backends.hf.sampling import uniforms

    whole = uniforms(7, torch.arange(8), 3)
    assert torch.equal(torch.cat([uniforms(7, torch.arange(4), 3), whole[4:]]), whole)
    assert len(set(whole.tolist())) == 8


@pytest.mark.parametrize("finished", [True, False])
def test_row_16_17_30_the_score_is_that_of_the_last_real_token(finished: bool) -> None:
    from kedge.backends.rewards import reward_source

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


def test_row_35_padding_has_no_part_in_ratio_or_loss() -> None:
    e = evidence()
    rule = ppo(score_position="after_last")
    mb = experience(e, rule.compute_advantages(e, 0.05))
    new = PolicyOutput(
        logprobs=e.model_outputs.logprobs + 0.1,
        entropy=torch.ones(4, 5),
        values=e.model_outputs.values,
    )
    noisy = PolicyOutput(
        logprobs=torch.where(mb.rows.loss_mask, new.logprobs, 50.0),
        entropy=new.entropy,
        values=torch.where(mb.rows.value_mask, new.values, 99.0),
    )
    clean, spoilt = rule.loss(new, mb), rule.loss(noisy, mb)
    assert {n: float(x) for n, x in clean.metrics.items()} == (
        {n: float(x) for n, x in spoilt.metrics.items()}
    )
    assert float(clean.metrics["val/ratio"]) == pytest.approx(math.exp(0.1), rel=1e-5)


def test_row_36_the_kl_penalty_is_per_token_and_signed() -> None:
    e = evidence()
    advantage_output = ppo().compute_advantages(e, 0.05)
    kl = e.model_outputs.logprobs - e.model_outputs.ref_logprobs  # type: ignore[operator]
    inner = torch.arange(5) < torch.tensor(LENGTHS)[:, None] - 1
    torch.testing.assert_close(advantage_output.rewards[inner], -0.05 * kl[inner])
    assert (advantage_output.kl < 0).any()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("position", "slots"), [("last", [2, 4, 0, 3]), ("after_last", [3, 4, 1, 4])]
)
def test_row_37_where_the_score_goes(position: Any, slots: list[int]) -> None:
    e = evidence()
    advantage_output = ppo(score_position=position).compute_advantages(e, 0.0)
    assert advantage_output.rewards.nonzero()[:, 1].tolist() == slots
    assert advantage_output.rewards.sum(1).tolist() == pytest.approx([1.0, -2.0, 0.5, 3.0])


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


def test_row_39_a_value_is_of_the_state_before_its_token() -> None:
    trainer = small()
    engine = trainer.engine
    prompts = engine.source.batch(0)
    rollout = engine.rollout_engine.generate(prompts, sampling=engine.sampling, seed=1)
    note = engine.learner.compute_logprobs(rollout, values=True, reference=False, full_kl=False)
    model: Any = trainer.value_model
    row = 0
    ids = torch.cat(
        [prompts.ids[row][prompts.mask[row]], rollout.ids[row][rollout.response_mask[row]]]
    )
    with torch.no_grad():
        every = model.score(model.gpt_neox(ids[None]).last_hidden_state)[0, :, 0]
    n = int(rollout.response_mask[row].sum())
    start = int(prompts.mask[row].sum()) - 1
    assert note.values is not None
    assert note.last_values is not None
    torch.testing.assert_close(note.values[row, :n], every[start : start + n], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(note.last_values[row], every[-1], atol=1e-5, rtol=1e-4)


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
    from kedge.engine import stages

    seen: list[list[int]] = []

    class Watch:
        version, rank, world_size = 0, 0, 1

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
    named = mb.rows.__class__(
        **{f: getattr(mb.rows, f) for f in mb.rows.__slots__}
        | {"prompt_ids": torch.arange(4)[:, None].expand(4, 2)}
    )
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
