"""Predicted and measured seconds of the stages of an iteration.

    python -m benchmarks.cost_model [--cases stories260k pythia-14m pythia-160m] [--threads 1]
        [--updates 2]

PPO in turn in one process: the stages are predicted from the shapes, the true lengths and the rates
of this processor, measured with the products of the model; then iterations run after one of
warm-up, and the fastest of each stage counts.  Seconds are of one thread's CPU time with
``--threads 1``, which other programs disturb less, and of wall time otherwise.

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

from benchmarks.ppo_vs_trl.__main__ import processor
from benchmarks.ppo_vs_trl.cases import CASES, EPOCHS, RESPONSE, Case, models, prompts, tokenizer
from benchmarks.ppo_vs_trl.side import common
from kedge import PPOConfig, PPOTrainer
from kedge.ext.cpu.matmul import input_gradient, outer, product
from kedge.ext.plan.command import ModelDims, read_dims
from kedge.learner.learner import HFLearner
from kedge.rewards.model import RewardModel
from kedge.rollout.embedded.engine import EmbeddedEngine

RESULTS = Path(__file__).parent / "results" / "cost_model.json"
STAGES = {
    "generate": (EmbeddedEngine, "generate"),
    "reward": (RewardModel, "score"),
    "annotate": (HFLearner, "compute_logprobs"),
    "train": (HFLearner, "optimizer_step"),
}
COLUMNS = 2048  # of the vocabulary in one product
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Device:
    """Rates of one processor.

    Args:
        flops: operations per second of each kind of product: "forward", "input_gradient",
            "weight_gradient", and "vocabulary" for all products with the output layer.
        bandwidth: bytes per second of long reads.
        width: bytes of a number.
    """

    flops: dict[str, float]
    bandwidth: float
    width: int = 4


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
    shape: ModelDims
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


def operations(job: Job) -> dict[str, dict[str, float]]:
    """Operations of each stage by kind; the policy's log-probabilities are those of sampling."""
    answered, seen = job.rows * job.response, (job.prompt + job.response) / 2
    once = job.forward(job.rows * (job.prompt + job.response), context=seen)
    head = job.forward(0, context=0, logits=answered)
    prefill = job.forward(job.rows * job.prompt, context=job.prompt / 2)
    decode = job.forward(answered, context=job.prompt + job.response / 2)
    backbones = job.epochs * 2 * once
    backward = {"input_gradient": backbones, "weight_gradient": backbones}
    return {
        "generate": {"forward": prefill + decode, "vocabulary": head},
        "reward": {"forward": once},
        "annotate": {"forward": 2 * once, "vocabulary": head},
        "train": {"forward": backbones, **backward, "vocabulary": job.epochs * 3 * head},
    }


def predict(job: Job, device: Device) -> dict[str, float]:
    """Seconds of each stage."""
    seconds = {
        stage: sum(count / device.flops[kind] for kind, count in kinds.items())
        for stage, kinds in operations(job).items()
    }
    cache = job.rows * job.shape.layers * job.shape.cache * (job.prompt + job.response / 2)
    weights = job.body + job.shape.hidden * job.shape.vocab
    read = job.response * (weights + cache) * device.width / device.bandwidth
    return seconds | {"generate": max(seconds["generate"], read)}


def measure(job: Job, clock: Clock) -> Device:
    """The rates of this processor for the largest products of a model, as Kedge computes them."""
    tokens, answered = int(job.rows * (job.prompt + job.response)), int(job.rows * job.response)
    hidden, inner = job.shape.hidden, job.shape.intermediate
    x, g, w = (torch.randn(shape) for shape in ((tokens, hidden), (tokens, inner), (inner, hidden)))
    states, head = x[:answered], torch.randn(min(COLUMNS, job.shape.vocab), hidden)
    big = torch.randn(32 << 20)  # 128 MiB, beyond the caches

    def best(work: Callable[[], object]) -> float:
        spent = []
        for _ in range(20):
            begin = clock()
            work()
            spent.append(clock() - begin)
        return min(spent)

    products: dict[str, Callable[[], object]] = {
        "forward": lambda: product(x, w),
        "input_gradient": lambda: input_gradient(g, w),
        "weight_gradient": lambda: outer(g, x),
    }
    count = 2 * tokens * inner * hidden
    flops = {kind: count / best(work) for kind, work in products.items()}
    flops["vocabulary"] = 2 * states.numel() * len(head) / best(lambda: product(states, head))
    return Device(flops=flops, bandwidth=big.numel() * 4 / best(big.sum))


def run(case: Case, given: list[list[int]], updates: int, clock: Clock) -> dict[str, float]:
    """Seconds of each stage in the iteration after the first where they are least."""
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def timed(stage: str, owner: type, name: str) -> None:
        call = getattr(owner, name)

        def wrapper(*args: Any, **named: Any) -> Any:
            begin = clock()
            result = call(*args, **named)
            seconds[stage].append(clock() - begin)
            return result

        setattr(owner, name, wrapper)

    usual = {stage: getattr(*where) for stage, where in STAGES.items()}
    for stage, where in STAGES.items():
        timed(stage, *where)
    policy, reference, reward, value = models(case)
    config = common(case, updates) | {"output_dir": tempfile.mkdtemp()}
    try:
        PPOTrainer(
            PPOConfig(**config, disable_tqdm=True, preflight=False, shuffle_dataset=False),
            tokenizer(case),
            policy,
            reference,
            reward,
            [{"input_ids": ids} for ids in given],
            value,
        ).train()
    finally:
        for stage, (owner, name) in STAGES.items():
            setattr(owner, name, usual[stage])
    steps = seconds["train"]
    seconds["train"] = [sum(steps[i : i + EPOCHS]) for i in range(0, len(steps), EPOCHS)]
    return {stage: min(spent[1:]) for stage, spent in seconds.items()}


def one(name: str, updates: int, clock: Clock) -> dict[str, Any]:
    """Predicted and measured seconds of one shape."""
    case = CASES[name]
    given = prompts(case, case.batch * updates)
    policy, *_ = models(case)
    job = Job(
        body=sum(p.numel() for n, p in policy.named_parameters() if ".layers." in n),
        shape=read_dims(policy.config),
        rows=case.batch,
        prompt=sum(map(len, given)) / len(given),
        response=RESPONSE,
        epochs=EPOCHS,
    )
    del policy
    device = measure(job, clock)
    predicted, seen = predict(job, device), run(case, given, updates, clock)
    predicted = {stage: predicted[stage] for stage in STAGES}
    return {
        "case": name,
        "gflops": {kind: rate / 1e9 for kind, rate in device.flops.items()},
        "gigabytes_per_second": device.bandwidth / 1e9,
        "predicted": predicted,
        "measured": seen,
        "ratio": {stage: seen[stage] / predicted[stage] for stage in STAGES},
        "update_ratio": sum(seen.values()) / sum(predicted.values()),
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--updates", type=int, default=3)
    asked = flags.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.process_time if asked.threads == 1 else time.perf_counter
    machine = {"processor": processor(), "torch": torch.__version__, "threads": asked.threads}
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = {row["case"]: row for row in stored.get("results", ()) if "processor" in row}
    for name in asked.cases:
        found[name] = one(name, asked.updates, clock) | machine
        print(json.dumps(found[name]), flush=True)
        RESULTS.write_text(json.dumps({"results": list(found.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
