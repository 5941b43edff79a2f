"""Runs of every trainer on the CPU and on an accelerator, as JSON on stdout.

python -m tests.e2e.strict_runs strict [CASE ...]     the simulated accelerator
python -m tests.e2e.strict_runs cuda [CASE ...]       a GPU

A separate process, because torch counts the devices at the first backward pass of a process.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig

import kedge.reporting.log
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
from kedge.learner.learner import HFLearner
from kedge.rollout.embedded.generation import DecodeLoop
from kedge.testing import tiny_policy
from tests.e2e.small import PROMPTS as ALL
from tests.e2e.small import length_reward
from tests.strict_device import strict_accelerator, strict_device, total_waits
from tests.unit.text_toys import neox_reward, word_tokenizer

PROMPTS = ALL[:6]
FLAGS = {"report_to": "none", "seed": 3, "logging_steps": 1, "disable_tqdm": True}
FLAGS |= {"save_strategy": "no", "bf16": False}  # on a GPU the default is bf16
LORA = LoraConfig(r=2, target_modules=["query_key_value"], task_type="CAUSAL_LM")
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "num_sample_generations": 1}
MASKED = {"top_k": 5, "top_p": 0.9}
SGD = {"optim": "sgd", "learning_rate": 0.1}  # Adam enlarges rounding where gradients are 0
MICRO = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
TWICE = {"num_ppo_epochs": 2}


def policy() -> Any:
    return tiny_policy("gpt_neox", vocab_size=32, hidden_size=8, layers=1, heads=2)


def ppo(flags: dict[str, Any], **inputs: Any) -> Any:
    sizes = {"total_episodes": 8, "per_device_train_batch_size": 4, "response_length": 4}
    return PPOTrainer(
        PPOConfig(**sizes | {"num_ppo_epochs": 2} | flags),
        processing_class=word_tokenizer(),
        model=policy(),
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS[:3] if "eval_strategy" in flags else None,
        **inputs,
    )


def ppo_reward_model(flags: dict[str, Any], **inputs: Any) -> Any:
    return ppo(flags, reward_model=neox_reward(), value_model=neox_reward(seed=1), **inputs)


def ppo_functions(flags: dict[str, Any], **inputs: Any) -> Any:
    return ppo(flags, reward_funcs=[length_reward], **inputs)


def rloo_older(flags: dict[str, Any], **inputs: Any) -> Any:
    sizes = {"total_episodes": 8, "per_device_train_batch_size": 4, "response_length": 4}
    if "peft_config" not in inputs:
        inputs["ref_policy"] = policy()
    return RLOOTrainer(
        config=RLOOConfig(**sizes | {"num_generations": 2, "num_ppo_epochs": 2} | flags),
        processing_class=word_tokenizer(),
        policy=policy(),
        reward_model=neox_reward(),
        train_dataset=PROMPTS,
        **inputs,
    )


def newer(kind: Any, config: Any, flags: dict[str, Any], inputs: dict[str, Any]) -> Any:
    sizes = {"max_steps": 2, "per_device_train_batch_size": 4, "response_length": 4}
    sizes |= {"num_ppo_epochs": 1}
    return kind(
        args=config(**sizes | {"num_generations": 2} | flags),
        processing_class=word_tokenizer(),
        model=policy(),
        reward_funcs=length_reward,
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS[:3] if "eval_strategy" in flags else None,
        **inputs,
    )


def rloo_newer(flags: dict[str, Any], **inputs: Any) -> Any:
    return newer(RLOOTrainer, RLOOConfig, flags, inputs)


def grpo(flags: dict[str, Any], **inputs: Any) -> Any:
    return newer(GRPOTrainer, GRPOConfig, flags, inputs)


def asynchronous(flags: dict[str, Any], **inputs: Any) -> Any:
    sizes = {"total_episodes": 8, "local_rollout_batch_size": 4, "response_length": 4}
    sizes |= {"per_device_train_batch_size": 4, "num_ppo_epochs": 2}
    return AsyncPPOTrainer(
        AsyncPPOConfig(**sizes | {"rollout_engine": "embedded"} | flags),
        processing_class=word_tokenizer(),
        model=policy(),
        reward_model=neox_reward(),
        train_dataset=PROMPTS,
        **inputs,
    )


def classic(flags: dict[str, Any], **inputs: Any) -> Any:
    options = {k: v for k, v in flags.items() if k not in {*FLAGS, "output_dir", "use_cpu"}}
    from tests import classic_models

    if inputs.pop("lora", False):
        inputs["peft_config"] = classic_models.lora(r=2)
    model = classic_models.gpt2(n_embd=8, n_layer=1)
    return classic_models.trainer(model, seed=3, sgd=0.1, **options, **inputs)


# name: (trainer, flags, inputs)
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "ppo": (ppo_reward_model, EVALUATED, {}),
    "ppo, resumed": (ppo_reward_model, {"save_strategy": "steps", "save_steps": 1}, {}),
    "ppo, LoRA": (ppo_reward_model, {}, {"peft_config": LORA}),
    "ppo, one base, gradient checkpointing": (
        ppo_functions,
        {"value_adapter": True, "gradient_checkpointing": True},
        {"peft_config": LORA},
    ),
    "ppo, gradient checkpointing": (ppo_reward_model, {"gradient_checkpointing": True}, {}),
    "ppo, bf16": (ppo_reward_model, {"bf16": True}, {}),
    "ppo, full KL": (ppo_reward_model, {"kl_estimator": "full"}, {}),
    "ppo, sampling masks": (ppo_reward_model, MASKED, {}),
    "ppo, micro-batches": (ppo_reward_model, MICRO, {}),
    "ppo, long responses": (ppo_reward_model, {"response_length": 40, "min_new_tokens": 20}, {}),
    "ppo, shared backbone": (ppo_functions, EVALUATED, {}),
    "ppo, shared backbone, LoRA, full KL": (
        ppo_functions,
        {"kl_estimator": "full"},
        {"peft_config": LORA},
    ),
    "ppo, shared backbone, min-p, 40 tokens": (
        ppo_functions,
        {"response_length": 40, "min_p": 0.02},
        {},
    ),
    "rloo, older": (rloo_older, {}, {}),
    "rloo, older, LoRA": (rloo_older, {}, {"peft_config": LORA}),
    "rloo, older, sampling masks": (rloo_older, MASKED | SGD, {}),
    "rloo": (rloo_newer, EVALUATED, {}),
    "rloo, LoRA, checkpointing": (
        rloo_newer,
        {"gradient_checkpointing": True},
        {"peft_config": LORA},
    ),
    "rloo, bf16": (rloo_newer, {"bf16": True}, {}),
    "grpo": (grpo, EVALUATED | {"beta": 0.04}, {}),
    "grpo, resumed": (grpo, {"save_strategy": "steps", "save_steps": 1}, {}),
    "grpo, loss grpo": (grpo, TWICE | {"loss_type": "grpo"}, {}),
    "grpo, loss bnpo": (grpo, TWICE | {"loss_type": "bnpo"}, {}),
    "grpo, loss dr_grpo": (grpo, TWICE | {"loss_type": "dr_grpo"}, {}),
    "grpo, loss cispo": (grpo, TWICE | {"loss_type": "cispo"}, {}),
    "grpo, GSPO": (
        grpo,
        TWICE | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {},
    ),
    "grpo, LoRA, bf16": (grpo, {"bf16": True}, {"peft_config": LORA}),
    "grpo, sampling masks, micro-batches": (grpo, MASKED | MICRO, {}),
    "async, lag 0": (asynchronous, {"max_lag": 0}, {}),
    "async, lag 1": (asynchronous, {"max_lag": 1}, {}),
    "async, lag 1, LoRA": (asynchronous, {"max_lag": 1}, {"peft_config": LORA}),
    "async, lag 1, bf16, sampling masks": (asynchronous, MASKED | {"max_lag": 1, "bf16": True}, {}),
}
if find_spec("kedge.ext"):
    CASES |= {"classic": (classic, {}, {}), "classic, LoRA": (classic, {}, {"lora": True})}
TIMED = ("time", "per_second", "runtime", "eps")


def metrics(trainer: Any, resume: bool) -> list[dict[str, Any]]:
    """The metrics of every iteration."""
    if not hasattr(trainer, "step"):
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer.state.log_history
    rows = []
    for seed in (0, 1):
        from tests import classic_models

        queries, _, scores = classic_models.samples(seed)
        torch.manual_seed(seed)
        queries = [q.to(trainer.accelerator.device) for q in queries]
        responses = trainer.generate(
            queries, return_prompt=False, max_new_tokens=4, do_sample=False
        )
        stats = trainer.step(queries, responses, scores)
        rows.append({k: float(v) for k, v in stats.items() if getattr(v, "ndim", 0) == 0})
    return rows


@contextlib.contextmanager
def counted(waits: dict[str, list[Any]]) -> Any:
    """Collects the waits of each optimizer step, and (waits, longest response) of each chunk."""
    step, advance = HFLearner.optimizer_step, DecodeLoop.advance
    batch = [0, 0]  # waits, and tokens of the longest response

    def counted_step(*args: Any, **kwargs: Any) -> Any:
        before = total_waits()
        result = step(*args, **kwargs)
        waits["steps"].append(total_waits() - before)
        return result

    def counted_advance(loop: DecodeLoop, version: int) -> Any:
        before = total_waits()
        result = advance(loop, version)
        batch[0] += total_waits() - before
        batch[1] = max(batch[1], *(len(x.tokens) for _, x in result), 0)
        if not loop._rows:
            waits["chunks"].append(tuple(batch))
            batch[:] = 0, 0
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFLearner, "optimizer_step", counted_step)
        patch.setattr(DecodeLoop, "advance", counted_advance)
        yield


def run(name: str, device: str, folder: str) -> dict[str, Any]:
    """The metrics of every iteration but for times, the size of every weight, and the waits."""
    make, options, inputs = CASES[name]
    flags = FLAGS | {"output_dir": f"{folder}/{len(name)}-{device}", "use_cpu": device == "cpu"}
    waits: dict[str, list[Any]] = {"steps": [], "chunks": []}
    AcceleratorState._reset_state(reset_partial_state=True)  # mixed precision of the run before
    on_device = strict_accelerator() if device == "strict" else contextlib.nullcontext()
    with on_device as counts, counted(waits), pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setenv("ACCELERATE_USE_CPU", "true")  # for trainers without use_cpu
        torch.manual_seed(0)
        trainer = make(flags | options, **inputs)
        rows = metrics(trainer, False)
        if "resumed" in name:  # two more iterations from the last checkpoint
            more = {"total_episodes": 16} if make is ppo_reward_model else {"max_steps": 4}
            trainer = make(flags | options | more, **inputs)
            rows = metrics(trainer, True)
        learner = trainer.learner if make is classic else trainer.engine.learner
        assert learner.device.type == device
        sizes = {n: p.detach().abs().sum().item() for n, p in learner.policy.named_parameters()}
        again = [key for key in counts or {} if key.startswith("again")]
    rows = [{k: v for k, v in r.items() if not any(word in k for word in TIMED)} for r in rows]
    if counts:
        sys.stderr.write(f"{name}: {total_waits()} waits, {counts.most_common(4)}\n")
    return {"rows": [*rows, sizes], "again": again, **waits}


def contract() -> dict[str, Any]:
    """The behavior of the simulated accelerator itself."""
    with strict_accelerator() as waits:
        x = torch.ones(2, device=strict_device()) + torch.tensor(1.0)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(2)
        with pytest.raises(TypeError, match="cpu"):
            x.numpy()
        counted = [x.sum().item(), *x.tolist(), len(x[x > 1]), x.cpu().numpy().sum().item()]
        host = torch.ones(3)
        host.to(strict_device())
        host.to(strict_device())
        host.add_(1).to(strict_device())
        found = total_waits()
    return {"values": counted, "waits": dict(waits), "total": found}


def main() -> None:
    accelerator = sys.argv[1]
    if accelerator == "strict":
        strict_device()
    kedge.reporting.log.draw_curves = lambda *_: None  # slower than the runs
    names, runs = sys.argv[2:] or list(CASES), {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        for i, name in enumerate(names):
            runs[name] = {
                device: run(name, device, f"{folder}/{i}") for device in ("cpu", accelerator)
            }
    report = {"runs": runs}
    if accelerator == "strict":
        report["contract"] = contract()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
