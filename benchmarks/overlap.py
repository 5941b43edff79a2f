"""Sampling and training of equal length, in turn and one update apart.

    python -m benchmarks.overlap

The example of open-instruct's page on asynchronous PPO with Kedge's own loop: 7 updates, each
second of sampling and of training replaced by a sleep, at max_lag 0 and 1.  Then pieces of very
different length on four engines, a whole batch at a time and as they are done.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tests.property.test_as_completed import Batches, Judge, Wide, writing
from tests.property.test_staleness import Run, Sampler, engine

from kedge.records.protocols import EngineInfo
from kedge.records.types import PromptBatch, Rollout, Sample, Sampling, group_rows
from kedge.rollout.scheduler.joining import join_groups

RESULTS = Path(__file__).parent / "results" / "overlap.json"
UPDATES, SECONDS = 7, 1.0
USUAL, TAIL, UPDATE = 0.02, 0.5, 0.2  # seconds of a prompt, of one in ten, of an update


class Slow(Sampler):
    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        time.sleep(SECONDS)
        return super().generate(prompts, sampling=sampling, seed=seed)


def seconds(lag: int) -> float:
    run = engine(lag, Slow(random.Random(0), 0.0))
    train: Any = Run.train_on

    class Both(Run):
        def train_on(self, *given: Any, **options: Any) -> dict[str, float]:
            time.sleep(SECONDS)
            found: dict[str, float] = train(self, *given, **options)
            return found

    run.__class__ = Both
    begin = time.perf_counter()
    run.run(UPDATES)
    return time.perf_counter() - begin


class Engines:
    """Four engines: one batch is handed to all of them, or each is given pieces of its own."""

    shares_weights, logprob_kind = False, "none"

    def __init__(self, seed: int) -> None:
        self.engines = [Uneven(random.Random(seed + n), 0.0) for n in range(4)]
        self.info = EngineInfo(engines=self.engines)

    def load_weights(self, weights: Any, version: int) -> Any:
        receipts = [engine.load_weights(weights, version) for engine in self.engines]
        return receipts[-1]

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        groups = group_rows(prompts)[1]
        size = len(groups) // len(self.engines)
        shares = [torch.cat(groups[i : i + size]) for i in range(0, len(groups), size)]
        with ThreadPoolExecutor(len(self.engines)) as pool:
            parts = pool.map(
                lambda lane, rows: lane.generate(prompts.rows(rows), sampling=sampling, seed=seed),
                self.engines,
                shares,
            )
            found = [Sample(rollout=part, reward_output=Judge().score(part)) for part in parts]
        return join_groups(found, prompts).rollout


class Uneven(Wide):
    """A long response now and then holds up the rest of its piece."""

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        for _ in range(len(prompts) // 2):
            time.sleep(TAIL if self.rng.random() < 0.1 else USUAL)
        return super().generate(prompts, sampling=sampling, seed=seed)


class Prompts24(Batches):
    """Twenty-four prompts a step."""

    def batch(self, step: int) -> PromptBatch:
        row = torch.arange(48)
        return PromptBatch(
            ids=(step * 100 + row)[:, None],
            mask=torch.ones(48, 1, dtype=torch.bool),
            group=row // 2,
            row=row,
        )


def uneven_seconds(pieces: int, seed: int) -> float:
    """Twenty updates of 0.2 s with four uneven engines; ``pieces`` 0: whole batches in order."""
    engines: Any = Engines(seed)
    run = writing(1, engines.engines, pieces or 1)
    made = Training(
        source=Prompts24(),
        rollout_engine=engines,
        reward=Judge(),
        learner=run.learner,
        algorithm=run.algorithm,
        kl=run.kl,
        batch_sizes=run.batch_sizes,
        sampling=run.sampling,
        max_lag=1,
        partial_batches=pieces,
    )
    made.log = []
    begin = time.perf_counter()
    made.run(20)
    return time.perf_counter() - begin


class Training(Run):
    def train_on(self, *given: Any, **options: Any) -> dict[str, float]:
        time.sleep(UPDATE)
        self.learner.version += 1
        self.step += 1
        self._moves += 1
        return {}


def main() -> None:
    found = {"synchronous": seconds(0), "one_apart": seconds(1)}
    found["ratio"] = found["one_apart"] / found["synchronous"]
    uneven = [(uneven_seconds(0, seed), uneven_seconds(24, seed)) for seed in (0, 100, 200)]
    found["uneven_in_order"], found["uneven_as_completed"] = map(
        statistics.median, zip(*uneven, strict=True)
    )
    found["uneven_ratio"] = found["uneven_as_completed"] / found["uneven_in_order"]
    print(json.dumps(found))
    RESULTS.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
