"""What ``kedge plan async-ppo`` predicts of an update's stages, against what they take here.

    python -m benchmarks.cost_model [--cases stories260k pythia-14m pythia-160m] [--threads 1]

PPO in turn in one process: the processor is measured, the stages are predicted from the shapes and
the true lengths, then two updates run after one of warm-up; the faster one counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.ppo_vs_trl.cases import CASES, RESPONSE, models, prompts, tokenizer
from benchmarks.ppo_vs_trl.side import common
from kedge import PPOConfig, PPOTrainer
from kedge.cli.planning import costs
from kedge.cli.planning.memory import read_shape

RESULTS = Path(__file__).parent / "results" / "cost_model.json"
UPDATES = 3
TIMES = {
    "generate": "time/rollout",
    "reward": "time/reward",
    "annotate": "time/annotate",
    "train": "time/update",
}


def one(name: str) -> dict[str, Any]:
    """Predicted and measured seconds of one shape."""
    case = CASES[name]
    policy, reference, reward, value = models(case)
    given = prompts(case, case.batch * UPDATES)
    shape = read_shape(policy.config)
    job = costs.Job(
        policy=_model(policy, shape),
        value=_model(value, shape),
        reward=_model(reward, shape),
        reference=True,
        rows=case.batch,
        prompt=sum(map(len, given)) / len(given),
        response=RESPONSE,
        recorded=True,  # in turn, in one process, Kedge takes what sampling recorded
    )
    device = costs.measured()
    predicted = costs.plan_split(job, device, learners=1, engines=0).seconds
    config = common(case, UPDATES) | {"output_dir": tempfile.mkdtemp()}
    trainer = PPOTrainer(
        PPOConfig(**config, disable_tqdm=True, preflight=False, shuffle_dataset=False),
        tokenizer(case),
        policy,
        reference,
        reward,
        [{"input_ids": ids} for ids in given],
        value,
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "time/update" in row][1:]
    seen = {stage: min(row[key] for row in rows) for stage, key in TIMES.items()}
    return {
        "case": name,
        "gflops": device.flops / 1e9,
        "gigabytes_per_second": device.bandwidth / 1e9,
        "predicted": {stage: predicted[stage] for stage in TIMES},
        "measured": seen,
        "ratio": {stage: seen[stage] / predicted[stage] for stage in TIMES},
        "update_ratio": sum(seen.values()) / sum(predicted[stage] for stage in TIMES),
    }


def _model(model: Any, shape: Any) -> costs.Model:
    blocks = [p for n, p in model.named_parameters() if ".layers." in n]
    return costs.Model(body=sum(p.numel() for p in blocks), shape=shape)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    flags.add_argument("--threads", type=int, default=1)
    asked = flags.parse_args()
    torch.set_num_threads(asked.threads)
    found = []
    for name in asked.cases:
        found.append(one(name))
        print(json.dumps(found[-1]), flush=True)
        RESULTS.write_text(json.dumps({"threads": asked.threads, "results": found}, indent=1))


if __name__ == "__main__":
    main()
