"""Defects of TRL's PPO that Kedge must not have; docs/trust/defects.md lists them by number."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch

from kedge import PPOConfig, PPOTrainer
from kedge.records.seeds import seed_for
from kedge.testing import tiny_policy
from tests.unit.callback_runs import Spy
from tests.unit.text_toys import neox_reward, word_tokenizer

from .small import PROMPTS, VOCAB, length_reward, rows, small


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}


@pytest.mark.parametrize(("minibatches", "accumulation"), [(1, 4), (2, 4), (4, 4), (4, 1)])
def test_d1_d2_d6_mini_batches_are_optimizer_steps(minibatches: int, accumulation: int) -> None:
    spy = Spy()
    trainer = small(
        per_device_train_batch_size=8 // accumulation,
        **{"gradient_accumulation_steps": accumulation, "num_mini_batches": minibatches},
        **{"num_ppo_epochs": 3, "total_episodes": 16, "learning_rate": 1e-9, "callbacks": [spy]},
    )
    trainer.train()
    assert spy.events.count("on_optimizer_step") == 2 * 3 * minibatches
    for row in rows(trainer):  # with a vanishing learning rate every ratio is 1
        assert row["val/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_d3_gradient_checkpointing_really_happens() -> None:
    finals = {}
    for on in (False, True):
        trainer = small(gradient_checkpointing=on, preflight=False)
        model: Any = trainer.model
        passes: list[bool] = []
        model.gpt_neox.layers[0].input_layernorm.register_forward_hook(
            lambda *_, passes=passes: passes.append(torch.is_grad_enabled())
        )
        trainer.train()
        finals[on] = (len(passes), weights(trainer))
    assert finals[True][0] > finals[False][0]  # layers run again in the backward pass
    for name, x in finals[False][1].items():
        if "query_key_value.bias" not in name:  # its key part has no gradient but rounding noise
            torch.testing.assert_close(x, finals[True][1][name], rtol=1e-4, atol=1e-5)


def test_d5_max_grad_norm_clips_each_model_and_the_norm_is_logged() -> None:
    ends = {}
    for limit in (0.0, 1e-4):
        # SGD, for Adam's steps do not depend on the size of a gradient.
        trainer = small(
            max_grad_norm=limit, optim="sgd", learning_rate=1.0, total_episodes=4, num_ppo_epochs=1
        )
        models = {"policy": trainer.model, "value": trainer.value_model}
        before = {n: [p.detach().clone() for p in m.parameters()] for n, m in models.items()}  # type: ignore[union-attr]
        trainer.train()
        for name, model in models.items():
            pairs = zip(model.parameters(), before[name], strict=True)  # type: ignore[union-attr]
            moved = math.sqrt(sum(float(((p.detach() - q) ** 2).sum()) for p, q in pairs))
            ends[name, limit] = (moved, rows(trainer)[0][f"grad_norm/{name}"])
    for name in ("policy", "value"):
        assert ends[name, 0.0][1] == pytest.approx(ends[name, 1e-4][1])  # before clipping
        assert ends[name, 0.0][0] == pytest.approx(ends[name, 0.0][1], rel=1e-3)
        assert ends[name, 1e-4][0] == pytest.approx(1e-4, rel=1e-2)


def test_d11_the_stop_token_is_trained_when_pad_is_eos() -> None:
    def stops(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [1.0 if ids[-1] == 0 else 0.0 for ids in completion_ids]

    trainer = small(
        **{"processing_class": word_tokenizer(pad=False), "reward_model": None},
        **{"reward_funcs": stops, "per_device_train_batch_size": 32, "total_episodes": 32 * 14},
        **{"num_ppo_epochs": 4, "learning_rate": 1e-2, "kl_coef": 0.0, "temperature": 1.0},
    )
    trainer.train()
    first, last = rows(trainer)[0], rows(trainer)[-1]
    assert first["val/num_eos_tokens"] < 16
    assert last["val/num_eos_tokens"] > 28


def test_d16_a_seed_gives_the_same_run() -> None:
    import random

    ends = []
    for noise in (1, 2):
        random.seed(noise)
        trainer = small(num_mini_batches=2)
        torch.manual_seed(noise)
        trainer.train()
        ends.append(weights(trainer))
    assert all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())
    other = small(num_mini_batches=2, seed=7)
    other.train()
    assert not all(torch.equal(x, ends[0][name]) for name, x in weights(other).items())


def test_d19_a_custom_stop_id_counts_as_an_end() -> None:
    trainer = small(
        stop_token=None,
        stop_token_ids=list(range(3, VOCAB)),
        missing_eos_penalty=100.0,
        reward_model=None,
        reward_funcs=length_reward,
    )
    trainer.train()
    assert rows(trainer)[0]["objective/scores"] > -100.0
    assert rows(trainer)[0]["val/num_eos_tokens"] > 0


def test_d31_the_value_continues_a_response_that_was_cut_off() -> None:
    returns = {}
    for on in (False, True):
        trainer = small(bootstrap_truncated=on, stop_token=None, total_episodes=4, lam=1.0)
        trainer.train()
        returns[on] = rows(trainer)[0]["val/return_mean"]
    fresh = small(stop_token=None, total_episodes=4)
    engine = fresh.engine
    drawn = engine.rollout_engine.generate(
        engine.source.batch(0), sampling=engine.sampling, seed=seed_for(engine.seed, "rollout", 0)
    )
    note = engine.learner.compute_logprobs(drawn, values=True, reference=False, full_kl=False)
    ends = note.last_values
    assert ends is not None
    assert not drawn.terminated.any()  # with gamma and lambda 1 each return grows by the last value
    assert returns[True] - returns[False] == pytest.approx(float(ends.mean()), abs=1e-5)
    assert abs(float(ends.mean())) > 1e-3


def test_d37_defaults_run_on_a_cpu() -> None:
    assert PPOConfig(output_dir="unused").bf16 is False or torch.cuda.is_available()
    trainer = PPOTrainer(
        PPOConfig(output_dir=tempfile.mkdtemp(), total_episodes=16),
        processing_class=word_tokenizer(),
        model=tiny_policy("gpt_neox", vocab_size=VOCAB),
        reward_model=neox_reward(vocab=VOCAB),
        train_dataset=PROMPTS,
    )
    trainer.train()
    (row,) = rows(trainer)
    assert row["step"] == 2
    assert row["episode"] == 16
