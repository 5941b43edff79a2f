"""One side: train a few updates with RLOO or GRPO and print, as JSON, when each ended.

python -m benchmarks.groups_vs_trl.side kedge grpo stories260k UPDATES PASSES THREADS
python -m benchmarks.groups_vs_trl.side trl grpo stories260k UPDATES PASSES THREADS
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


def texts(case: Any, count: int) -> list[dict[str, str]]:
    """Prompts as text: TRL's trainers tokenize for themselves."""
    decode = tokenizer(case).decode
    return [{"prompt": decode(ids, skip_special_tokens=True)} for ids in prompts(case, count)]


def options(case: Any, updates: int, passes: int, *, peer: bool) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.batch,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "num_iterations": passes,
        "steps_per_generation": 1,
        "max_completion_length": RESPONSE,
        "max_steps": updates * (passes if peer else 1),  # TRL counts optimizer steps
        "learning_rate": 3e-4,
        "beta": 0.05,
        "temperature": 0.7,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": passes if peer else 1,
        "disable_tqdm": True,
    }


def train(side: str, kind: str, case: Any, updates: int, passes: int, clock: Clock) -> None:
    policy, _, reward, _ = models(case)
    made = tokenizer(case)
    if side == "trl" and case.shape is not None:  # it loads the reference from the policy's name
        policy.name_or_path = policy.config._name_or_path = tempfile.mkdtemp()
        policy.save_pretrained(policy.name_or_path)
    if made.pad_token is None:
        made.pad_token = made.eos_token
    reward.config.pad_token_id = made.pad_token_id
    if side == "kedge":
        import kedge.trl as library
    else:
        import trl as library  # type: ignore[no-redef]
    config = getattr(library, f"{kind.upper()}Config")
    trainer = getattr(library, f"{kind.upper()}Trainer")
    given = options(case, updates, passes, peer=side == "trl")
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
    side, kind, name = sys.argv[1:4]
    updates, passes, threads = map(int, sys.argv[4:7])
    torch.set_num_threads(threads)
    case, clock = CASES[name], Clock()
    train(side, kind, case, updates, passes, clock)
    step = passes if side == "trl" else 1
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
