"""One side: train a few updates with RLOO or GRPO and print, as JSON, when each ended.

python -m benchmarks.groups_vs_trl.side kedge grpo stories260k 4 2
python -m benchmarks.groups_vs_trl.side trl grpo stories260k 4 2
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import warnings
from itertools import pairwise
from typing import Any

import torch

from benchmarks.ppo_vs_trl.cases import CASES, RESPONSE, models, prompts, tokenizer
from benchmarks.ppo_vs_trl.side import Clock

GROUP = 4
PASSES = 4  # over each batch of responses


def texts(case: Any, count: int) -> list[dict[str, str]]:
    """Prompts as text: TRL's trainers tokenise for themselves."""
    decode = tokenizer(case).decode
    return [{"prompt": decode(ids, skip_special_tokens=True)} for ids in prompts(case, count)]


def options(case: Any, updates: int, *, peer: bool) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.batch,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "num_iterations": PASSES,
        "steps_per_generation": 1,
        "max_completion_length": RESPONSE,
        "max_steps": updates * (PASSES if peer else 1),  # TRL counts optimiser steps
        "learning_rate": 3e-4,
        "beta": 0.05,
        "temperature": 0.7,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": PASSES if peer else 1,
        "disable_tqdm": True,
    }


def train(side: str, kind: str, case: Any, updates: int, clock: Clock) -> None:
    policy, _, reward, _ = models(case)
    made = tokenizer(case)
    if made.pad_token is None:
        made.pad_token = made.eos_token
    reward.config.pad_token_id = made.pad_token_id
    if side == "kedge":
        import kedge as library
    else:
        import trl as library  # type: ignore[no-redef]
    config = getattr(library, f"{kind.upper()}Config")
    trainer = getattr(library, f"{kind.upper()}Trainer")
    given = options(case, updates, peer=side == "trl")
    if side == "kedge":
        given |= {"preflight": False, "num_sample_generations": 0}
        data: Any = texts(case, case.batch)
    else:
        from datasets import Dataset

        data = Dataset.from_list(texts(case, case.batch))
    trainer(
        model=policy,
        reward_funcs=reward,
        args=config(**given),
        train_dataset=data,
        processing_class=made,
        reward_processing_classes=made,
        callbacks=[clock],
    ).train()


def main() -> None:
    warnings.simplefilter("ignore")
    side, kind, name, updates, threads = sys.argv[1:6]
    torch.set_num_threads(int(threads))
    case, clock = CASES[name], Clock()
    train(side, kind, case, int(updates), clock)
    step = PASSES if side == "trl" else 1
    times, cpu = clock.times[::step], clock.cpu[::step]
    report = {
        "side": side,
        "seconds": [b - a for a, b in pairwise(times)],
        "cpu_seconds": [b - a for a, b in pairwise(cpu)],
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
