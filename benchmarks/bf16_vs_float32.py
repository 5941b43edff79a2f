"""Stages of one PPO iteration with ``bf16=True`` and in float32, on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.bf16_vs_float32 [--case pythia-160m] [--rounds 2]

Models and sizes are those of ``benchmarks.ppo_vs_trl``.  Each round runs one process per precision,
in turn.  CPU seconds of the second iteration, of one epoch, and their medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ppo_vs_trl.__main__ import processor
from benchmarks.ppo_vs_trl.cases import CASES, EPOCHS, models, prompts, tokenizer
from benchmarks.ppo_vs_trl.side import common

RESULTS = Path(__file__).parent / "results" / "bf16_vs_float32.json"
STAGES = ("generate", "compute_logprobs", "optimizer_step")


def measure(name: str, *, bf16: bool) -> dict[str, float]:
    """CPU seconds of each stage in this process."""
    from kedge import PPOConfig, PPOTrainer
    from kedge.learner.learner import HFLearner
    from kedge.rollout.embedded.engine import EmbeddedEngine

    torch.set_num_threads(1)
    case, seconds = CASES[name], {}

    def timed(owner: type, stage: str) -> None:
        call = getattr(owner, stage)

        def wrapper(*args: Any, **named: Any) -> Any:
            begin = time.process_time()
            result = call(*args, **named)
            seconds[stage] = time.process_time() - begin  # of the last call
            return result

        setattr(owner, stage, wrapper)

    timed(EmbeddedEngine, "generate")
    timed(HFLearner, "compute_logprobs")
    timed(HFLearner, "optimizer_step")
    policy, reference, reward, value = models(case)
    options = common(case, 2) | {"bf16": bf16, "num_ppo_epochs": 1}
    PPOTrainer(
        PPOConfig(**options, disable_tqdm=True, preflight=False),
        tokenizer(case),
        policy,
        reference,
        reward,
        [{"input_ids": ids} for ids in prompts(case, 2 * case.batch)],
        value,
    ).train()
    return seconds


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--case", default="pythia-160m", choices=list(CASES))
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--one", choices=("bf16", "float32"), help=argparse.SUPPRESS)
    flags = flags.parse_args()
    if flags.one:
        print("REPORT " + json.dumps(measure(flags.case, bf16=flags.one == "bf16")))
        return
    raw: dict[str, list[dict[str, float]]] = {"float32": [], "bf16": []}
    for _ in range(flags.rounds):
        for precision, reports in raw.items():
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bf16_vs_float32"]
            done = subprocess.run(
                [*command, "--case", flags.case, "--one", precision],
                capture_output=True,
                text=True,
                check=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            line = next(x for x in done.stdout.splitlines() if x.startswith("REPORT "))
            reports.append(json.loads(line.removeprefix("REPORT ")))
    medians = {p: {s: statistics.median(r[s] for r in rs) for s in STAGES} for p, rs in raw.items()}
    result: dict[str, Any] = {"case": flags.case, "processor": processor(), "cpu_seconds": medians}
    result["ratio"] = {s: medians["float32"][s] / medians["bf16"][s] for s in STAGES}
    total = {p: sum(x.values()) + (EPOCHS - 1) * x["optimizer_step"] for p, x in medians.items()}
    result["ratio"]["iteration of four epochs"] = total["float32"] / total["bf16"]
    print(json.dumps(result, indent=1))
    RESULTS.write_text(json.dumps(result | {"raw": raw, "torch": torch.__version__}, indent=1))


if __name__ == "__main__":
    main()
