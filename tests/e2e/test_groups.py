"""RLOOTrainer and GRPOTrainer end to end, in a second each."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from kedge import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, ppo, reinforce_pp, remax
from kedge.records.errors import ConfigError
from kedge.testing import tiny_policy
from tests.e2e.small import PROMPTS, QUIET, VOCAB, length_reward, rows, small
from tests.unit.text_toys import neox_reward, word_tokenizer

SIZES = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "total_episodes": 16,
    "learning_rate": 3e-3,
    **QUIET,
    "stop_token": "eos",
}
TRAINER = (
    "quantization_config",
    "peft_config",
    *("processing_class", "args", "model", "reward_funcs", "algorithm", "ref_model"),
    *("train_dataset", "eval_dataset", "rollout_engine"),
)


def make(trainer: Any, config: Any, **changes: Any) -> Any:
    given = {k: changes.pop(k) for k in tuple(changes) if k in TRAINER}
    options = {"output_dir": tempfile.mkdtemp(), "response_length": 6, **SIZES} | changes
    parts = {
        "args": config(**options),
        "model": tiny_policy("gpt_neox", vocab_size=VOCAB),
        "reward_funcs": length_reward,
        "train_dataset": PROMPTS,
        "processing_class": word_tokenizer(),
    }
    return trainer(**parts | given)


def rloo(**changes: Any) -> RLOOTrainer:
    one_pass = {"num_ppo_epochs": 1, "temperature": 1.0}
    return make(RLOOTrainer, RLOOConfig, **one_pass | changes)


def grpo(**changes: Any) -> GRPOTrainer:
    return make(GRPOTrainer, GRPOConfig, **changes)


def test_groups_of_equal_scores_are_dropped_whatever_their_kl() -> None:
    row = _one_row(
        grpo(
            reward_funcs=lambda completions, **_: [1.0] * len(completions),
            ref_model=tiny_policy("gpt_neox", vocab_size=VOCAB, seed=4),
            drop_uniform_groups=True,
            kl_coef=0.1,
            max_steps=1,
        )
    )
    assert abs(row["objective/kl"]) > 1e-3
    assert row["rollout/untrained_rows"] == 8
    assert row["grad_norm"] == 0


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


CASES: dict[str, Callable[[], Any]] = {
    "rloo with every option": lambda: rloo(
        token_level_kl=True,
        normalize_reward=True,
        reward_clip_range=1.0,
        normalize_advantage=True,
        mask_truncated_completions=True,
        cliprange_high=0.3,
    ),
    "reinforce_pp baseline": lambda: rloo(algorithm=reinforce_pp(baseline=True, beta=0.1)),
    "remax": lambda: rloo(algorithm=remax(), num_generations=1),
    "grpo with KL": lambda: grpo(beta=0.1, kl_coef=0.05, num_ppo_epochs=2),
    "cispo": lambda: grpo(loss_type="cispo", num_ppo_epochs=2),
    "gspo": lambda: grpo(importance_sampling_level="sequence", epsilon=3e-3, num_ppo_epochs=2),
    "dapo": lambda: grpo(
        epsilon_high=0.28, overlong_buffer=3, mask_truncated_completions=True, delta=4.0
    ),
    "grpo in parts": lambda: grpo(
        gradient_accumulation_steps=4, num_mini_batches=4, per_device_train_batch_size=2
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_training_moves_the_policy_and_logs_numbers(name: str) -> None:
    trainer = CASES[name]()
    before = weights(trainer).clone()
    trainer.train()
    logged = rows(trainer)
    assert len(logged) == 2
    assert all(math.isfinite(x) for row in logged for x in row.values() if isinstance(x, float))
    assert logged[0]["val/ratio"] == pytest.approx(1.0, abs=0.9)
    assert not torch.equal(weights(trainer), before)


def test_a_reference_only_where_it_is_needed() -> None:
    assert "objective/kl" not in _one_row(grpo())
    assert _one_row(grpo(beta=0.1))["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert _one_row(grpo(ref_model=tiny_policy("gpt_neox", vocab_size=VOCAB, seed=5)))[
        "objective/kl"
    ] != pytest.approx(0, abs=1e-2)
    assert "objective/kl" not in _one_row(rloo(kl_coef=0.0))


def _one_row(trainer: Any) -> dict[str, Any]:
    trainer.train()
    return rows(trainer)[0]


def test_older_and_newer_names_train_the_same() -> None:
    """The same numbers by either spelling; the reward reads whole texts in the older one."""

    def words(texts: list[str]) -> list[float]:
        return [float(len(t.split())) for t in texts]

    def same(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return words([p + c for p, c in zip(prompts, completions, strict=True)])

    newer = rloo(
        reward_funcs=same, kl_coef=0.1, cliprange=0.3, num_ppo_epochs=2, temperature=0.9, seed=3
    )
    sizes = {k: v for k, v in SIZES.items() if k != "num_generations"}
    older = RLOOTrainer(
        config=RLOOConfig(
            **{
                "output_dir": tempfile.mkdtemp(),
                "num_generations": 4,
                "kl_coef": 0.1,
                "cliprange": 0.3,
            },
            **{"num_ppo_epochs": 2, "response_length": 6, "temperature": 0.9, "seed": 3},
            **sizes,
        ),
        tokenizer=word_tokenizer(),
        policy=tiny_policy("gpt_neox", vocab_size=VOCAB),
        ref_policy=tiny_policy("gpt_neox", vocab_size=VOCAB),
        reward_model=words,
        train_dataset=PROMPTS,
    )
    newer.train()
    older.train()
    assert rows(older)[-1]["objective/scores"] == rows(newer)[-1]["objective/scores"]
    torch.testing.assert_close(weights(older), weights(newer))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": "x"}, "policy and model"),
        ({"reward_model": length_reward}, "reward_model and reward_funcs"),
        ({"value_model": "x"}, "no argument 'value_model'"),
    ],
)
def test_both_names_of_an_argument_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RLOOTrainer(
            model=tiny_policy("gpt_neox", vocab_size=VOCAB), reward_funcs=length_reward, **given
        )


def test_arguments_without_a_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="keyword arguments only, got 2 positional"):
        RLOOTrainer(tiny_policy("gpt_neox", vocab_size=VOCAB), length_reward)


def test_the_wrong_config_is_named() -> None:
    with pytest.raises(ConfigError, match=r"must be a kedge\.RLOOConfig"):
        rloo(args=GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True))
    with pytest.raises(ConfigError, match=r"must be a kedge\.GRPOConfig"):
        grpo(args=RLOOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True))
    with pytest.raises(ConfigError, match=r"must be a kedge\.PPOConfig"):
        small(args=RLOOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True))


@pytest.mark.parametrize(
    ("make_it", "name"),
    [
        (lambda: rloo(algorithm=remax(), num_generations=1, cliprange=0.3), "cliprange=0.3"),
        (lambda: rloo(algorithm=reinforce_pp(), normalize_reward=True), "normalize_reward=True"),
        (lambda: grpo(algorithm=reinforce_pp(), loss_type="grpo"), "loss_type='grpo'"),
        (lambda: grpo(algorithm=reinforce_pp(), beta=0.1), "beta=0.1"),
        (lambda: small(algorithm=reinforce_pp(), lam=0.9), "lam=0.9"),
        (lambda: small(algorithm=ppo(), lam=0.9), "lam=0.9"),
        (lambda: small(algorithm=remax(), value_warmup_steps=2), "value_warmup_steps=2"),
        (lambda: small(algorithm=remax(), value_model=neox_reward(vocab=VOCAB)), "value_model is"),
        (lambda: rloo(num_generations=1), "num_generations=1 must be at least 2"),
        (lambda: grpo(num_generations=1), "num_generations=1 must be at least 2"),
    ],
)
def test_options_that_the_algorithm_does_not_read_are_refused(
    make_it: Callable[[], Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(name)):
        make_it()
    assert small(algorithm=ppo(lam=0.9), value_warmup_steps=1).value_model is not None


def test_the_tokenizer_beside_an_in_memory_model_is_found(tmp_path: Path) -> None:
    word_tokenizer().save_pretrained(tmp_path)
    policy = tiny_policy("gpt_neox", vocab_size=VOCAB)
    policy.save_pretrained(tmp_path)
    loaded = type(policy).from_pretrained(tmp_path)
    trainer = GRPOTrainer(
        loaded,
        length_reward,
        GRPOConfig(output_dir=tempfile.mkdtemp(), response_length=4, **SIZES),
        PROMPTS,
    )
    trainer.train()
    assert trainer.processing_class is not None
    trainer.create_model_card(model_name="m")
    text = (Path(trainer.args.output_dir) / "README.md").read_text()
    assert "with GRPO" in text
    assert "2402.03300" in text
    assert "| epsilon | 0.2 |" in text


def test_gdpo_normalizes_every_reward_before_the_sum() -> None:
    """The advantages of a run are those of a float64 computation with NumPy."""
    calls: list[list[Any]] = []

    def wide(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append([ids[0] * 10.0 for ids in completion_ids])
        return calls[-1]

    def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        calls.append([None if ids[0] % 3 == 0 else ids[-1] / 7 for ids in completion_ids])
        return calls[-1]

    seen: list[torch.Tensor] = []
    trainer = grpo(
        reward_funcs=[wide, some], reward_weights=[1.0, 0.5], beta=0.0, total_episodes=8,
        multi_objective_aggregation="normalize_then_sum", preflight=False,
    )  # fmt: skip
    compute = trainer.engine.algorithm.compute_advantages

    def watched(e: Any, kl_coef: float) -> Any:
        found = compute(e, kl_coef)
        seen.append((found.advantages * e.rollout.loss_mask).sum(1) / e.rollout.loss_mask.sum(1))
        return found

    trainer.engine.algorithm = replace(trainer.engine.algorithm, compute_advantages=watched)
    trainer.train()
    groups = np.array([[np.nan if x is None else x for x in c] for c in calls[:2]], dtype=float)
    grouped = groups.reshape(2, 2, 4)  # two groups of four
    count = (~np.isnan(grouped)).sum(2, keepdims=True)
    mean = np.nanmean(grouped, 2, keepdims=True)
    square = np.nansum((grouped - mean) ** 2, 2, keepdims=True) / np.maximum(count - 1, 1)
    z = np.nan_to_num((grouped - mean) / (np.sqrt(square) + 1e-4)).reshape(2, 8)
    total = z[0] + 0.5 * z[1]
    want = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    assert np.abs(want).max() > 0.5
    assert seen[0].numpy() == pytest.approx(want, abs=1e-4)


def test_gdpo_refuses_what_it_would_not_compare() -> None:
    for option in ({"kl_coef": 0.1}, {"missing_eos_penalty": 1.0}, {"credit": "turn"}):
        with pytest.raises(ConfigError, match="normalize_then_sum"):
            grpo(multi_objective_aggregation="normalize_then_sum", **option)


@pytest.mark.parametrize("make_trainer", [grpo, rloo])
def test_the_reference_moves_towards_the_policy(make_trainer: Any, tmp_path: Path) -> None:
    """Every second iteration, as computed in float64, also in a resumed run."""
    kl = "beta" if make_trainer is grpo else "kl_coef"
    options: dict[str, Any] = {
        "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25,
        kl: 0.1, "total_episodes": 40, "output_dir": str(tmp_path), "save_strategy": "steps",
        "save_steps": 3,
    }  # fmt: skip
    trainer = make_trainer(**options)
    policy, reference = trainer.model, trainer.ref_model
    want = [p.detach().double() for p in reference.parameters()]
    mean_before = [p.detach().double() for p in policy.parameters()]
    advance = trainer.engine.learner.advance_version

    def watched() -> None:
        weights = [p.detach().double() for p in policy.parameters()]
        if trainer.engine.learner.version % 2:  # the iteration that ends is the second, fourth ...
            want[:] = [0.75 * q + 0.25 * p for q, p in zip(want, weights, strict=True)]
        advance()

    trainer.engine.learner.advance_version = watched
    trainer.train()
    assert trainer.engine.step == 5
    for own, expected, start in zip(reference.parameters(), want, mean_before, strict=True):
        assert own.detach().double().numpy() == pytest.approx(expected.numpy(), abs=1e-6)
        assert not torch.equal(own.detach().double(), start)
    again = make_trainer(**options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for one, other in zip(again.ref_model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)
    for wrong, text in (
        ({kl: 0.0}, "set beta or kl_coef above 0"),
        ({"peft_config": LoraConfig(task_type="CAUSAL_LM")}, "an adapter shares its base"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_trainer(**options | {"output_dir": tempfile.mkdtemp()} | wrong)
