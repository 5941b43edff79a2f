"""Sampling and training of equal length, in turn and one update apart.

    python -m benchmarks.overlap

The example of open-instruct's page on asynchronous PPO with Kedge's own loop: 7 updates, each
second of sampling and of training replaced by a sleep, at max_lag 0 and 1.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from tests.property.test_staleness import Run, Sampler, engine

from kedge.types import PromptBatch, Rollout, Sampling

RESULTS = Path(__file__).parent / "results" / "overlap.json"
UPDATES, SECONDS = 7, 1.0


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


def main() -> None:
    found = {"synchronous": seconds(0), "one_apart": seconds(1)}
    found["ratio"] = found["one_apart"] / found["synchronous"]
    print(json.dumps(found))
    RESULTS.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
