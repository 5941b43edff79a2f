"""Runs that sample with vLLM, one per process: python -m tests.gpu.vllm_runs CASE.

Prints the metrics of every iteration as JSON.  Runs on a CPU as well, with vLLM for CPUs.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from typing import Any

import torch
from peft import LoraConfig

from kedge import AsyncPPOConfig, AsyncPPOTrainer, GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from kedge.testing import tiny_policy
from tests.e2e.small import length_reward
from tests.unit.text_toys import neox_reward, word_tokenizer

CUDA = torch.cuda.is_available()
PROMPTS = [{"prompt": f"w{i % 29 + 3} w{(i * 7) % 29 + 3}" + " w3" * (i % 3)} for i in range(64)]
FLAGS: dict[str, Any] = {"report_to": "none", "seed": 3, "logging_steps": 1, "disable_tqdm": True}
FLAGS |= {"save_strategy": "no", "learning_rate": 1e-3, "preflight": True, "bf16": CUDA}
SMALL = {"kv_cache_memory_bytes": 2**28, "max_model_len": 128}
EAGER = SMALL | {"enforce_eager": True}
COLOCATED = {"rollout_engine": "vllm"}
IN_FLIGHT = {"rollout_schedule": "as_completed", "in_flight_weight_updates": True, "max_lag": 2}
ITERATIONS = 6


def policy() -> Any:
    """Attention heads of size 64, which vLLM has on every device."""
    shape = {"hidden_size": 128, "heads": 2, "layers": 2, "initializer_range": 0.1}
    return tiny_policy("qwen2", vocab_size=32, max_positions=128, **shape)


def grpo(flags: dict[str, Any], **inputs: Any) -> Any:
    sizes = {"max_steps": ITERATIONS, "per_device_train_batch_size": 16, "num_generations": 4}
    return GRPOTrainer(
        args=GRPOConfig(**sizes | {"response_length": 24} | FLAGS | flags),
        processing_class=word_tokenizer(),
        model=policy(),
        reward_funcs=length_reward,
        train_dataset=PROMPTS,
        **inputs,
    )


def ppo(flags: dict[str, Any], **inputs: Any) -> Any:
    sizes = {"total_episodes": 16 * ITERATIONS, "per_device_train_batch_size": 16}
    return PPOTrainer(
        PPOConfig(**sizes | {"response_length": 24, "num_sample_generations": 0} | FLAGS | flags),
        processing_class=word_tokenizer(),
        model=policy(),
        reward_model=neox_reward(),
        value_model=neox_reward(seed=1),
        train_dataset=PROMPTS,
        **inputs,
    )


def asynchronous(flags: dict[str, Any], **inputs: Any) -> Any:
    sizes = {"total_episodes": 16 * ITERATIONS, "local_rollout_batch_size": 16}
    sizes |= {"per_device_train_batch_size": 16, "response_length": 24}
    return AsyncPPOTrainer(
        AsyncPPOConfig(**sizes | FLAGS | flags),
        processing_class=word_tokenizer(),
        model=policy(),
        reward_model=neox_reward(),
        train_dataset=PROMPTS,
        **inputs,
    )


LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
FULL = {"bf16": False}  # needs an attention kernel of vLLM for float32
# name: (trainer, flags, inputs)
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "grpo, eager": (grpo, COLOCATED | {"vllm_engine_args": EAGER}, {}),
    "grpo, graphs": (grpo, COLOCATED | {"vllm_engine_args": SMALL}, {}),
    "grpo, float32": (grpo, COLOCATED | FULL | {"vllm_engine_args": EAGER}, {}),
    "grpo, LoRA": (grpo, COLOCATED | {"vllm_engine_args": EAGER}, {"peft_config": LORA}),
    "grpo, top-k": (grpo, COLOCATED | {"vllm_engine_args": EAGER, "top_k": 5}, {}),
    "ppo, graphs, sleep": (
        ppo,
        {"rollout_engine": "vllm", "vllm_sleep": CUDA, "vllm_engine_args": SMALL},
        {},
    ),
    "ppo, lag 1": (ppo, {"rollout_engine": "vllm", "max_lag": 1, "vllm_engine_args": SMALL}, {}),
    "ppo, server": (ppo, {"rollout_engine": "vllm_server", "vllm_engine_args": SMALL}, {}),
    "async ppo, in flight": (
        asynchronous,
        IN_FLIGHT | {"rollout_engine": "vllm", "vllm_engine_args": SMALL},
        {},
    ),
}


def run(name: str) -> list[dict[str, float]]:
    """Metrics of every iteration of a case."""
    build, flags, inputs = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(flags | {"output_dir": folder}, **inputs)
        trainer.train()
        rollouts = trainer.engine.rollout_engine
        rows = [row for row in trainer.state.log_history if "grad_norm" in row]
        rows[-1]["version"] = rollouts.service.version()
        rollouts.close()
    return rows


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        metrics = run(sys.argv[1])
    sys.stdout.write(f"REPORT {json.dumps(metrics)}\n")
