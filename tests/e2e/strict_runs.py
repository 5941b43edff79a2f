"""The default run of each trainer, on the CPU and on the pretend accelerator, as JSON on stdout.

A process of its own, because torch counts the devices at the first backward pass of a process.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from typing import Any

import pytest
import torch

import kedge.trainers.run.run
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
from kedge.testing import tiny_policy
from kedge.testing.strict_device import strict_accelerator, strict_device
from tests import classic_models
from tests.unit.text_toys import neox_reward, word_tokenizer

PROMPTS = [{"prompt": f"w{i} w{i + 1}" + " w3" * (i % 3)} for i in range(3, 9)]
FLAGS = {"report_to": "none", "seed": 3, "logging_steps": 1, "disable_tqdm": True}


def policy() -> Any:
    return tiny_policy("gpt_neox", vocab_size=32, hidden_size=8, layers=1, heads=2)


def words(completions: list[str], **_: Any) -> list[float]:
    return [len(c.split()) + 0.1 * (c.split()[:1] == ["w5"]) for c in completions]


def ppo(flags: dict[str, Any], **given: Any) -> Any:
    sizes = {"total_episodes": 8, "per_device_train_batch_size": 4, "response_length": 4}
    return PPOTrainer(
        PPOConfig(**flags, **sizes),
        processing_class=word_tokenizer(),
        model=policy(),
        train_dataset=PROMPTS,
        **given,
    )


def ppo_reward_model(flags: dict[str, Any]) -> Any:
    flags |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    models = {"reward_model": neox_reward(), "value_model": neox_reward(seed=1)}
    return ppo(flags, eval_dataset=PROMPTS[:3], **models)


def ppo_functions(flags: dict[str, Any]) -> Any:
    return ppo(flags, reward_funcs=[words])


def rloo_older(flags: dict[str, Any]) -> Any:
    sizes = {"total_episodes": 8, "per_device_train_batch_size": 4, "response_length": 4}
    return RLOOTrainer(
        config=RLOOConfig(**flags, **sizes, rloo_k=2),
        processing_class=word_tokenizer(),
        policy=policy(),
        ref_policy=policy(),
        reward_model=neox_reward(),
        train_dataset=PROMPTS,
    )


def newer(kind: Any, config: Any, flags: dict[str, Any]) -> Any:
    sizes = {"max_steps": 2, "per_device_train_batch_size": 4, "max_completion_length": 4}
    return kind(
        args=config(**flags, **sizes, num_generations=2),
        processing_class=word_tokenizer(),
        model=policy(),
        reward_funcs=words,
        train_dataset=PROMPTS,
    )


def rloo_newer(flags: dict[str, Any]) -> Any:
    return newer(RLOOTrainer, RLOOConfig, flags)


def grpo(flags: dict[str, Any]) -> Any:
    return newer(GRPOTrainer, GRPOConfig, flags)


def asynchronous(flags: dict[str, Any], lag: int) -> Any:
    sizes = {"total_episodes": 8, "local_rollout_batch_size": 4, "response_length": 4}
    sizes |= {"per_device_train_batch_size": 4}
    return AsyncPPOTrainer(
        AsyncPPOConfig(**flags, **sizes, rollout_engine="embedded", max_lag=lag),
        processing_class=word_tokenizer(),
        model=policy(),
        reward_model=neox_reward(),
        train_dataset=PROMPTS,
    )


def lag_0(flags: dict[str, Any]) -> Any:
    return asynchronous(flags, 0)


def lag_1(flags: dict[str, Any]) -> Any:
    return asynchronous(flags, 1)


def classic(flags: dict[str, Any]) -> Any:
    return classic_models.trainer(classic_models.gpt2(n_embd=8, n_layer=1), seed=3)


TRAINERS = {f.__name__: f for f in (ppo_reward_model, ppo_functions, rloo_older, rloo_newer, grpo)}
TRAINERS |= {f.__name__: f for f in (lag_0, lag_1, classic)}
TIMED = ("time", "per_second", "runtime", "eps")


def metrics(trainer: Any) -> list[dict[str, Any]]:
    """The metrics of every update."""
    if not hasattr(trainer, "step"):
        trainer.train()
        return trainer.state.log_history
    rows = []
    for seed in (0, 1):
        queries, _, scores = classic_models.samples(seed)
        torch.manual_seed(seed)
        device = trainer.accelerator.device
        responses = trainer.generate(
            [q.to(device) for q in queries], return_prompt=False, max_new_tokens=4, do_sample=False
        )
        stats = trainer.step([q.to(device) for q in queries], responses, scores)
        rows.append({k: float(v) for k, v in stats.items() if getattr(v, "ndim", 0) == 0})
    return rows


def run(name: str, device: str, folder: str) -> list[dict[str, Any]]:
    """The metrics of every update but for times, and at last the size of every weight."""
    flags = FLAGS | {"output_dir": f"{folder}/{name}-{device}", "use_cpu": device == "cpu"}
    with strict_accelerator() if device == "strict" else contextlib.nullcontext() as waits:
        torch.manual_seed(0)
        trainer = TRAINERS[name](flags)
        learner = trainer.learner if name == "classic" else trainer.engine.learner
        assert learner.device.type == device
        rows = [
            {k: v for k, v in row.items() if not any(word in k for word in TIMED)}
            for row in metrics(trainer)
        ]
        sizes = {n: p.detach().abs().sum().item() for n, p in learner.policy.named_parameters()}
    if waits:
        sys.stderr.write(f"{name} waits {waits.total()} times: {waits.most_common(5)}\n")
    return [*rows, sizes]


def contract() -> dict[str, Any]:
    """What the pretend accelerator itself does."""
    with strict_accelerator() as waits:
        x = torch.ones(2, device=strict_device()) + torch.tensor(1.0)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(2)
        with pytest.raises(TypeError, match="cpu"):
            x.numpy()
        counted = [x.sum().item(), *x.tolist(), len(x[x > 1]), x.cpu().numpy().sum().item()]
    return {"values": counted, "waits": dict(waits)}


def main() -> None:
    strict_device()
    kedge.trainers.run.run.draw_curves = lambda *_: None  # slower than the runs
    wanted, found = sys.argv[1:] or list(TRAINERS), {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        for name in wanted:
            found[name] = {device: run(name, device, folder) for device in ("cpu", "strict")}
    json.dump({"contract": contract(), "runs": found}, sys.stdout)


if __name__ == "__main__":
    main()
