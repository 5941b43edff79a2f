"""One side: train a few updates and print, as JSON, when each ended and how much memory it took.

python -m benchmarks.ppo_vs_trl.side kedge stories260k 4
python -m benchmarks.ppo_vs_trl.side trl stories260k 4     (in TRL's own environment)
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import tempfile
import time
import warnings
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.ppo_vs_trl.cases import (
    CASES,
    EPOCHS,
    RESPONSE,
    adapter,
    models,
    prompts,
    tokenizer,
    value_with_adapter,
)


class Clock(TrainerCallback):
    """The time at the start and after each update."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu: list[float] = []

    def _note(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.times.append(time.perf_counter())
        self.cpu.append(used.ru_utime + used.ru_stime)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._note()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._note()


def common(case: Any, updates: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.batch,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": 1,
        "num_ppo_epochs": EPOCHS,
        "total_episodes": case.batch * updates,
        "response_length": RESPONSE,
        "stop_token": None,  # the same work on both sides
        "learning_rate": 3e-4,
        "kl_coef": 0.05,
        "temperature": 0.7,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "num_sample_generations": 0,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "local_rollout_forward_batch_size": case.batch,
    }


def kedge(case: Any, updates: int, clock: Clock, *, value_model: bool = False) -> None:
    from kedge import PPOConfig, PPOTrainer

    one_base = case.lora and not value_model
    policy, reference, reward, value = models(case, value=not one_base)
    PPOTrainer(
        PPOConfig(
            **common(case, updates), disable_tqdm=True, preflight=False, value_adapter=one_base
        ),
        tokenizer(case),
        policy,
        reference,
        reward,
        [{"input_ids": ids} for ids in prompts(case, case.batch * updates)],
        value,
        callbacks=[clock],
        peft_config=adapter("CAUSAL_LM") if case.lora else None,
    ).train()


def trl(case: Any, updates: int, clock: Clock, *, value_adapter: bool = False) -> None:
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    policy, reference, reward, value = models(case)
    rows = [{"input_ids": ids} for ids in prompts(case, case.batch * updates)]
    trainer = PPOTrainer(
        args=PPOConfig(**common(case, updates)),
        processing_class=tokenizer(case),
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value_with_adapter(value) if value_adapter else value,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[: case.batch]),
        callbacks=[clock],
        peft_config=adapter("CAUSAL_LM") if case.lora else None,
    )
    trainer.train()


SIDES = {
    "kedge": kedge,
    "trl": trl,
    "kedge-value-model": partial(kedge, value_model=True),
    "trl-value-adapter": partial(trl, value_adapter=True),
}


def main() -> None:
    warnings.simplefilter("ignore")
    side, name, updates = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(int(sys.argv[4]) if len(sys.argv) > 4 else 2)
    case, clock = CASES[name], Clock()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    SIDES[side](case, updates, clock)
    import transformers

    report = {
        "side": side,
        "case": name,
        "batch": case.batch,
        "seconds": [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)],
        "cpu_seconds": [b - a for a, b in zip(clock.cpu, clock.cpu[1:], strict=False)],
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rss_before_mib": before / 1024,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
