"""Predicted and measured seconds of the stages of an iteration.

    python -m benchmarks.cost_model [--cases stories260k pythia-14m pythia-160m] [--threads 1]

PPO in turn in one process: the processor is measured, the stages are predicted from the shapes and
the true lengths, then two iterations run after one of warm-up; the faster one counts.

A matrix product of a model with N weights costs 2 N operations per token forward and 4 N backward
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1).  Every step of sampling reads all weights and
the cache once for the whole batch, however small it is (Pope et al. 2022, arXiv:2211.05102), so
that a step takes the longer of its operations and its bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ppo_vs_trl.cases import CASES, RESPONSE, models, prompts, tokenizer
from benchmarks.ppo_vs_trl.side import common
from kedge import PPOConfig, PPOTrainer
from kedge.cli.planning.memory import Shape, read_shape
from kedge.ops.cpu.matmul import product

RESULTS = Path(__file__).parent / "results" / "cost_model.json"
UPDATES = 3
TIMES = {
    "generate": "time/rollout",
    "reward": "time/reward",
    "annotate": "time/annotate",
    "train": "time/update",
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """Operations per second of large matrix products, and bytes per second of long reads."""

    flops: float
    bandwidth: float
    width: int = 4  # bytes of a number


@dataclass(frozen=True, kw_only=True)
class Job:
    """One iteration of PPO with four models of one size.

    Args:
        body: weights of the layers of each model, without embedding and head.
        shape: sizes of each model.
        rows: responses.
        prompt: tokens of a prompt, on average.
        response: tokens of a response, on average.
        epochs: passes over the batch.
    """

    body: int
    shape: Shape
    rows: int
    prompt: float
    response: float
    epochs: int = 4

    def forward(self, tokens: float, *, context: float, logits: float = 0.0) -> float:
        """Operations for ``tokens`` that see ``context`` tokens each, and for some ``logits``."""
        attention = 4 * self.shape.layers * self.shape.hidden * context
        return (
            tokens * (2 * self.body + attention) + logits * 2 * self.shape.hidden * self.shape.vocab
        )


def operations(job: Job) -> dict[str, float]:
    """Operations of each stage; the policy's log-probabilities are those recorded in sampling."""
    answered, seen = job.rows * job.response, (job.prompt + job.response) / 2
    once = job.forward(job.rows * (job.prompt + job.response), context=seen)
    head = job.forward(0, context=0, logits=answered)
    prefill = job.forward(job.rows * job.prompt, context=job.prompt / 2)
    decode = job.forward(answered, context=job.prompt + job.response / 2, logits=answered)
    return {
        "generate": prefill + decode,
        "reward": once,
        "annotate": 2 * once + head,
        "train": job.epochs * 3 * (2 * once + head),
    }


def predict(job: Job, device: Device) -> dict[str, float]:
    """Seconds of each stage."""
    seconds = {stage: count / device.flops for stage, count in operations(job).items()}
    cache = job.rows * job.shape.layers * job.shape.cache * (job.prompt + job.response / 2)
    weights = job.body + job.shape.hidden * job.shape.vocab
    read = job.response * (weights + cache) * device.width / device.bandwidth
    return seconds | {"generate": max(seconds["generate"], read)}


def measure() -> Device:
    """This machine's processor, from a fraction of a second of products and reads."""
    a, b = torch.randn(512, 1024), torch.randn(1024, 1024)
    big = torch.randn(32 << 20)  # 128 MiB, beyond the caches

    def best(work: Callable[[], object]) -> float:
        spent = []
        for _ in range(5):
            begin = time.perf_counter()
            work()
            spent.append(time.perf_counter() - begin)
        return min(spent)

    fastest = min(best(lambda: a @ b), best(lambda: product(a, b)))  # of torch's two libraries
    flops = 2 * a.shape[0] * b.numel() / fastest
    return Device(flops=flops, bandwidth=big.numel() * 4 / best(big.sum))


def one(name: str) -> dict[str, Any]:
    """Predicted and measured seconds of one shape."""
    case = CASES[name]
    policy, reference, reward, value = models(case)
    given = prompts(case, case.batch * UPDATES)
    blocks = [p for n, p in policy.named_parameters() if ".layers." in n]
    job = Job(
        body=sum(p.numel() for p in blocks),
        shape=read_shape(policy.config),
        rows=case.batch,
        prompt=sum(map(len, given)) / len(given),
        response=RESPONSE,
    )
    device = measure()
    predicted = predict(job, device)
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
