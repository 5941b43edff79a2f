"""LoRA on bases of 4 and 8 bits, and bitsandbytes' optimizers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from kedge import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from kedge.models.peft import quantization
from kedge.testing import tiny_policy
from tests.e2e.small import length_reward
from tests.unit.text_toys import neox_reward, word_tokenizer

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
    ),
]
PROMPTS = [{"prompt": f"w{i} w{i + 1}" + " w3" * (i % 3)} for i in range(3, 19)]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
FLAGS: dict[str, Any] = {"report_to": "none", "seed": 3, "logging_steps": 1, "disable_tqdm": True}
FLAGS |= {"learning_rate": 1e-2, "per_device_train_batch_size": 8, "bf16": CUDA}
ITERATIONS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("base"))
    shape = {"vocab_size": 32, "hidden_size": 128, "heads": 4, "initializer_range": 0.1}
    tiny_policy("qwen2", **shape).save_pretrained(folder)
    return folder


def grpo(model: Any, folder: Path, bits: Any = None, **flags: Any) -> Any:
    sizes = {"max_steps": ITERATIONS, "num_generations": 4, "response_length": 8}
    return GRPOTrainer(
        args=GRPOConfig(**sizes | {"output_dir": str(folder), "beta": 0.1} | FLAGS | flags),
        processing_class=word_tokenizer(),
        model=model,
        reward_funcs=length_reward,
        train_dataset=PROMPTS,
        peft_config=LORA,
        quantization_config=None if bits is None else quantization(bits),
    )


def ppo(model: Any, folder: Path, bits: int) -> Any:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=quantization(bits), device_map={"": 0 if CUDA else "cpu"}
    )
    sizes = {"total_episodes": 8 * ITERATIONS, "response_length": 8, "num_sample_generations": 0}
    return PPOTrainer(
        PPOConfig(**sizes | {"output_dir": str(folder), "save_strategy": "no"} | FLAGS),
        processing_class=word_tokenizer(),
        model=policy,
        reward_model=neox_reward(),
        value_model=neox_reward(seed=1),
        train_dataset=PROMPTS,
        peft_config=LORA,
    )


def rows(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.parametrize("bits", [4, 8])
def test_grpo_on_a_quantized_base_resumes_with_the_same_numbers(
    base: str, tmp_path: Path, bits: int
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}
    whole = grpo(base, tmp_path / "whole", bits, **saves)
    whole.train()
    history = rows(whole)
    assert len(history) == ITERATIONS
    # The reference is the base with its adapter disabled; LLM.int8 rounds by all rows of a batch.
    assert history[0]["objective/kl"] == pytest.approx(0, abs=0.05 if CUDA or bits == 8 else 1e-4)
    assert history[-1]["objective/kl"] > history[0]["objective/kl"] + 1e-3
    assert all(row["grad_norm"] > 0 for row in history)
    again = grpo(base, tmp_path / "whole", bits, **saves)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for before, after in zip(history[2:], rows(again)[-2:], strict=True):
        for key in ("objective/kl", "objective/scores", "grad_norm"):
            assert after[key] == pytest.approx(before[key], rel=0.05 if CUDA else 1e-3, abs=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_ppo_trains_on_a_quantized_base(base: str, tmp_path: Path, bits: int) -> None:
    trainer = ppo(base, tmp_path, bits)
    trainer.train()
    history = rows(trainer)
    assert len(history) == ITERATIONS
    assert all(row["grad_norm"] > 0 for row in history)
    assert history[-1]["objective/kl"] > 1e-3


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw_bnb_8bit", "paged_adamw_8bit"])
def test_optimizers_with_8_bit_states_resume(base: str, tmp_path: Path, optimizer: str) -> None:
    from transformers import AutoModelForCausalLM

    def train(resume: str | None = None) -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        flags = {"optim": optimizer, "save_strategy": "steps", "save_steps": 2}
        trainer = grpo(model, tmp_path, **flags, learning_rate=1e-3)
        trainer.train(resume_from_checkpoint=resume)
        return rows(trainer)

    history = train()
    assert len(history) == ITERATIONS
    resumed = train(str(tmp_path / "checkpoint-2"))
    assert resumed[-1]["grad_norm"] == pytest.approx(history[-1]["grad_norm"], rel=1e-2)
