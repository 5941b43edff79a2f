"""A response ends at the tokenizer's EOS token and at those of the model's generation_config."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kedge import (
    AsyncPPOConfig,
    AsyncPPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from kedge.cli.generate import generate_completions
from kedge.models.load import eos_token_ids
from kedge.records.types import Sampling
from kedge.testing import ConstantReward, tiny_policy
from kedge.trainers.advice import FirstBatch, nothing_ends
from tests.e2e.small import small

from .text_toys import EOS, rollout_of, word_tokenizer
from .toys import ToyLearner

PROMPTS = [{"prompt": f"w{i}"} for i in range(3, 7)]


def model(*ends: int, **config: Any) -> Any:
    made = tiny_policy("gpt_neox", vocab_size=32, hidden_size=8, layers=1, heads=2, **config)
    made.generation_config.eos_token_id = list(ends) or None
    return made


def saved(folder: Path, *ends: int) -> str:
    model(*ends).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


def test_the_ids_are_those_of_tokenizer_and_generation_config() -> None:
    assert eos_token_ids(model(9, EOS, 5), word_tokenizer()) == (EOS, 9, 5)
    assert eos_token_ids(model(), word_tokenizer()) == (EOS,)
    assert eos_token_ids(model(9), word_tokenizer(eos=False)) == (9,)
    assert eos_token_ids(model(), word_tokenizer(eos=False)) == ()
    assert eos_token_ids(torch.nn.Linear(1, 1), word_tokenizer()) == (EOS,)


def test_an_id_that_the_model_cannot_sample_is_left_out() -> None:
    assert eos_token_ids(model(32, 50256, 31), word_tokenizer()) == (EOS, 31)


def test_a_folder_says_the_same_as_the_model_in_it(tmp_path) -> None:
    folder = saved(tmp_path, 9, 5)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # weights are not read
    assert eos_token_ids(folder, word_tokenizer()) == (EOS, 9, 5)
    (tmp_path / "generation_config.json").unlink()
    assert eos_token_ids(folder, word_tokenizer()) == (EOS, 1)  # of the model's configuration
    assert eos_token_ids(str(tmp_path / "none"), word_tokenizer()) == (EOS,)


def test_the_folder_of_an_adapter_stands_for_its_base(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base = model(9)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["query_key_value"]))
    assert eos_token_ids(adapted, word_tokenizer()) == (EOS, 9)
    adapted.save_pretrained(tmp_path / "adapter")
    assert eos_token_ids(str(tmp_path / "adapter"), word_tokenizer()) == (EOS, 9)


def build(trainer: Any, config: Any, folder: str, **inputs: Any) -> Any:
    args = config(**options(folder), **KINDS.get(config, {}))
    tokenizer = word_tokenizer()
    return trainer(args=args, processing_class=tokenizer, reward_funcs=[words], **inputs)


KINDS: dict[Any, dict[str, Any]] = {
    AsyncPPOConfig: {"rollout_engine": "embedded"},
    RLOOConfig: {"num_generations": 2},
    GRPOConfig: {"num_generations": 2},
}


def options(folder: str) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": 4, "response_length": 53}
    return {"output_dir": folder, "use_cpu": True, **sizes}


def words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


@pytest.mark.parametrize(
    ("trainer", "config"),
    [
        (PPOTrainer, PPOConfig),
        (AsyncPPOTrainer, AsyncPPOConfig),
        (RLOOTrainer, RLOOConfig),
        (GRPOTrainer, GRPOConfig),
    ],
)
def test_every_trainer_ends_responses_at_them_by_default(trainer, config, tmp_path) -> None:
    """Sampling every other token ends a response, so hardly any has the full length."""
    policy = model(*range(3, 32, 2))
    engine = build(trainer, config, str(tmp_path), model=policy, train_dataset=PROMPTS).engine
    assert engine.sampling.stop_ids == (EOS, *range(3, 32, 2))
    batch = engine.source.batch(0)
    rollout = engine.rollout_engine.generate(batch, sampling=engine.sampling, seed=0)
    last = rollout.ids.gather(1, rollout.response_mask.sum(1, keepdim=True) - 1)[:, 0]
    assert rollout.terminated.all()
    assert all(int(token) in engine.sampling.stop_ids for token in last)


def test_kedge_generate_ends_at_them(tmp_path, caplog) -> None:
    from datasets import Dataset

    found = generate_completions(
        saved(tmp_path, *range(32)), Dataset.from_list(PROMPTS), max_new_tokens=8, temperature=1.0
    )
    assert [row["finished"] for row in found] == [True] * 4
    assert all(len(row["completion"].split()) <= 1 for row in found)
    assert "EOS" not in caplog.text


@pytest.mark.parametrize("batch_size", [2, 7, 64])
def test_kedge_generate_writes_the_completions_of_a_prompt_in_order(batch_size, tmp_path) -> None:
    from datasets import Dataset

    found = generate_completions(
        saved(tmp_path),
        Dataset.from_list(PROMPTS),
        num_generations=3,
        batch_size=batch_size,
        max_new_tokens=4,
        temperature=1.0,
    )
    assert [row["prompt"] for row in found] == [p["prompt"] for p in PROMPTS for _ in range(3)]
    assert len({row["completion"] for row in found[:3]}) == 3


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}])
def test_kedge_generate_samples_among_the_likeliest_tokens(limit, tmp_path) -> None:
    from datasets import Dataset

    def texts(**options: Any) -> list[str]:
        rows = Dataset.from_list(PROMPTS)
        found = generate_completions(saved(tmp_path), rows, max_new_tokens=4, **options)
        return [row["completion"] for row in found]

    assert texts(temperature=1.0, **limit) == texts(temperature=0.0) != texts(temperature=1.0)


@pytest.mark.parametrize(
    ("stops", "finished", "expected"),
    [
        (
            Sampling(max_new_tokens=2, stop_ids=(0, 261)),
            False,
            "within 2 tokens (stop tokens: 0 '<0>', 261 '<261>'): raise",
        ),
        (Sampling(max_new_tokens=2, stop_strings=(".",)), False, "(stop string: '.'): raise"),
        (Sampling(max_new_tokens=2, stop_ids=(0,)), True, None),
        (Sampling(max_new_tokens=2), False, None),  # fixed length was asked for
    ],
)
def test_preflight_names_what_ends_a_response_when_none_ended(stops, finished, expected) -> None:
    rollout = rollout_of([([3], [4, 5]), ([3], [6, 7])], finished=[finished, False])
    found = nothing_ends(
        FirstBatch(
            rollout=rollout,
            reward_output=ConstantReward().score(rollout),
            loop=SimpleNamespace(learner=ToyLearner(), sampling=stops),
            fresh_reference=True,
            decode=lambda ids: f"<{ids[0]}>",
        )
    )
    assert expected in found if expected else found is None


@pytest.mark.parametrize(
    ("added", "options", "warns"),
    [
        (0.0, {}, True),
        (0.0, {"whiten_advantages": False}, True),
        (2.5, {}, False),
        (0.0, {"lam": 1.0}, False),
        (0.0, {"value_warmup_steps": 1}, False),
    ],
)
def test_preflight_says_that_negative_rewards_punish_the_end(
    added: float, options: dict[str, Any], warns: bool, tmp_path: Path, caplog: Any
) -> None:
    """By GAE with a value of 0, a token that is k before the end gets 0.95^k of the reward."""
    lengths: list[int] = []

    def brief(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [added - 1.0 - 0.01 * len(ids) for ids in completion_ids]

    small(
        model=model(9, 10),
        reward_model=None,
        reward_funcs=[brief],
        train_dataset=PROMPTS,
        output_dir=str(tmp_path),
        response_length=64,
        per_device_train_batch_size=64,
        total_episodes=64,
        **options,
    ).train()
    ended = [n for n in lengths if n < 64]
    every = np.array([(-1 - 0.01 * n) * 0.95**k for n in lengths for k in range(n)])
    low = (np.mean([-1 - 0.01 * n for n in ended]) - every.mean()) / every.std()
    text = next((r.getMessage() for r in caplog.records if "not to end" in r.message), None)
    assert (text is not None) == warns
    if text is not None:
        assert float(re.search(r"\((-[\d.]+) standard", text)[1]) == pytest.approx(low, abs=0.1)
