"""One run of one library on one GPU; prints a line of JSON.

python -m benchmarks.gpu.side kedge ppo qwen2.5-0.5b --iterations 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu.cases import (
    EPOCHS,
    SHAPES,
    Case,
    build_models,
    build_prompts,
    build_tokenizer,
)


class Clock(TrainerCallback):
    """Seconds of every iteration, the device idle at both ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def note(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    on_train_begin = on_step_end = note


def words(completions: list[Any], **_: Any) -> list[float]:
    """A score that varies."""
    return [float(len(set(str(c).split()))) for c in completions]


def common(case: Case) -> dict[str, Any]:
    """Options with the same name in both libraries."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.micro,
        "gradient_accumulation_steps": case.batch // case.micro,
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": case.checkpointing,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
    }


def ppo_options(case: Case) -> dict[str, Any]:
    return common(case) | {
        "num_mini_batches": 1,
        "num_ppo_epochs": EPOCHS,
        "total_episodes": case.batch * case.iterations,
        "response_length": case.response,
        "stop_token": None,  # the same work on both sides
        "kl_coef": 0.05,
        "num_sample_generations": 0,
        "local_rollout_forward_batch_size": case.batch,
    }


def build_kedge(case: Case, clock: Clock) -> Any:
    """A trainer of Kedge."""
    import kedge

    rows = [{"input_ids": ids} for ids in build_prompts(case.shape, case.batch * case.iterations)]
    tokenizer = build_tokenizer(case.shape)
    quiet = {"disable_tqdm": True, "preflight": False, "rollout_engine": case.engine}
    models = build_models(case.shape, all_four=case.method == "ppo")
    if case.method == "ppo":
        return kedge.PPOTrainer(
            kedge.PPOConfig(**ppo_options(case), **quiet),
            tokenizer,
            models["policy"],
            models["reference"],
            models["reward"],
            rows,
            models["value"],
            callbacks=[clock],
        )
    config, trainer = {
        "rloo": (kedge.trl.RLOOConfig, kedge.RLOOTrainer),
        "grpo": (kedge.trl.GRPOConfig, kedge.GRPOTrainer),
    }[case.method]
    return trainer(
        args=config(
            **group_options(case) | quiet,
            stop_token=None,
            local_rollout_forward_batch_size=case.batch,
        ),
        processing_class=tokenizer,
        model=models["policy"],
        reward_funcs=words,
        train_dataset=rows,
        callbacks=[clock],
    )


def group_options(case: Case) -> dict[str, Any]:
    return common(case) | {
        "max_steps": case.iterations,
        "num_generations": 8,
        "max_completion_length": case.response,
        "beta": 0.0,
    }


def build_trl(case: Case, clock: Clock) -> Any:
    """A trainer of TRL 1.12, the last version with PPO."""
    from datasets import Dataset

    rows = [{"input_ids": ids} for ids in build_prompts(case.shape, case.batch * case.iterations)]
    if case.method != "ppo":
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

        config, trainer = {"rloo": (RLOOConfig, RLOOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}[
            case.method
        ]
        return trainer(
            args=config(**group_options(case)),
            processing_class=build_tokenizer(case.shape),
            model=build_models(case.shape, all_four=False)["policy"],
            reward_funcs=words,
            train_dataset=Dataset.from_list(
                [{"prompt": " ".join(f"w{i}" for i in row["input_ids"])} for row in rows]
            ),
            callbacks=[clock],
        )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    models = build_models(case.shape, all_four=True)
    return PPOTrainer(
        args=PPOConfig(**ppo_options(case)),
        processing_class=build_tokenizer(case.shape),
        model=models["policy"],
        ref_model=models["reference"],
        reward_model=models["reward"],
        value_model=models["value"],
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[: case.batch]),
        callbacks=[clock],
    )


def count_flops(case: Case, parameters: int, tokens: float) -> float:
    """Floating-point operations of one iteration: 2 a weight and token forward, 4 backward.

    Sampling and the pass of each model over the batch, then the epochs; attention is not counted.
    RLOO and GRPO take one step an iteration here, so the training pass is the only other one.
    """
    both = 2 * (1 + 4) + 6 * 2 * EPOCHS  # policy, reference, reward and value model
    passes = both if case.method == "ppo" else 2 + 6
    return passes * parameters * tokens


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("library", choices=["kedge", "trl"])
    flags.add_argument("method", choices=["ppo", "rloo", "grpo"])
    flags.add_argument("shape", choices=list(SHAPES))
    for name in ("batch", "micro", "response", "iterations"):
        flags.add_argument(f"--{name}", type=int, default=getattr(Case, name))
    flags.add_argument("--engine", default=Case.engine, help="rollout_engine of Kedge")
    flags.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    args = vars(flags.parse_args())
    warnings.simplefilter("ignore")
    case, clock = Case(**args), Clock()
    with contextlib.redirect_stdout(sys.stderr):
        trainer = {"kedge": build_kedge, "trl": build_trl}[case.library](case, clock)
        trainer.train()
    seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    if case.engine != "embedded":
        trainer.engine.rollout_engine.close()
    policy = build_models_size(case.shape)
    tokens = case.batch * (case.response + (32 + 128) / 2)
    median = statistics.median(seconds[1:])
    phases = [
        {k: round(v, 3) for k, v in row.items() if k.startswith("time/")}
        for row in trainer.state.log_history
        if "time/step" in row
    ]
    cuda = torch.cuda.is_available()
    report = {
        **args,
        "seconds": [round(s, 3) for s in seconds],
        "tokens_per_second": round(case.batch * case.response / median, 1),
        "tflops": round(count_flops(case, policy, tokens) / median / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else None,
        "phases": phases[-1] if phases else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }
    print("REPORT " + json.dumps(report))


def build_models_size(shape: str) -> int:
    """Weights of the policy."""
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu.cases import build_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(shape))
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
