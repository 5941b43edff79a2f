"""CPU seconds of the scheduler with its threads: one for each of 512 engines of 256 slots.

    python -m benchmarks.scheduler_threads [--engines 512] [--slots 256]

``RolloutScheduler`` with pretended engines, which return four groups of 8 responses at a time,
and a reward that scores nothing.  Counts all threads, without what the engines themselves use, and
writes "threads" in results/dispatch.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from typing import Any

import torch

from kedge.algorithms import ppo
from kedge.records.protocols import EngineInfo
from kedge.records.types import PromptBatch, Receipt, RewardOutput, Rollout, Sampling
from kedge.rollout.scheduler.as_completed import AsCompleted
from kedge.rollout.scheduler.collector import RolloutCollector
from kedge.rollout.scheduler.scheduler import RolloutScheduler
from kedge.rollout.scheduler.worker import WeightUpdate

from .dispatch import RESULTS

GROUP, RETURNED, WIDTH = 8, 4, 4
ITERATIONS = 4


class Prompts:
    """As many rows as there are slots."""

    def __init__(self, rows: int) -> None:
        row = torch.arange(rows)
        mask = torch.ones(rows, 1, dtype=torch.bool)
        self._batch = PromptBatch(ids=row[:, None], mask=mask, group=row // GROUP, row=row)

    def batch(self, step: int) -> PromptBatch:
        return self._batch


class PretendEngine:
    """Returns the groups that it got first."""

    shares_weights, logprob_kind = False, "none"

    def __init__(self, slots: int) -> None:
        self.info = EngineInfo(slots=slots, updates_in_flight=True)
        self.unfinished, self.version, self.seconds = 0, 0, 0.0
        self._held: deque[PromptBatch] = deque()

    def load_weights(self, weights: Any, version: int) -> Receipt | None:
        self.version = version
        return None

    def cancel(self) -> None:
        self._held.clear()
        self.unfinished = 0

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        begin, size = time.thread_time(), RETURNED * GROUP
        self._held.extend(prompts.rows(slice(i, i + size)) for i in range(0, len(prompts), size))
        self.unfinished += len(prompts)
        self.seconds += time.thread_time() - begin

    def advance(self) -> Rollout | None:
        if not self._held:
            return None
        begin = time.thread_time()
        prompts = self._held.popleft()
        rows = len(prompts)
        self.unfinished -= rows
        mask = torch.ones(rows, WIDTH, dtype=torch.bool)
        rollout = Rollout(
            prompts=prompts,
            ids=torch.zeros(rows, WIDTH, dtype=torch.int64),
            loss_mask=mask,
            response_mask=mask,
            terminated=mask[:, 0],
            policy_version=torch.full((rows,), self.version),
        )
        self.seconds += time.thread_time() - begin
        return rollout


class Zeros:
    """The reward."""

    def score(self, rollout: Rollout) -> RewardOutput:
        rows = len(rollout)
        return RewardOutput(scores=torch.zeros(rows), valid=torch.ones(rows, dtype=torch.bool))


def measure(engines: int, slots: int, *, in_flight: bool) -> dict[str, Any]:
    """CPU and wall seconds per iteration at max_lag 2, after the first iteration."""
    parts = [PretendEngine(slots) for _ in range(engines)]
    rollouts: Any = PretendEngine(0)
    rollouts.info = EngineInfo(engines=parts)
    scheduler = RolloutScheduler(AsCompleted(1, 2, in_flight=in_flight))
    collector = RolloutCollector(
        source=Prompts(engines * slots),
        reward=Zeros(),
        sampling=Sampling(max_new_tokens=WIDTH),
        algorithm=ppo(),
        seed=0,
        clock=time.perf_counter,
    )
    scheduler.configure(collector, rollouts)
    marks = []
    with scheduler.open(0, 100 * ITERATIONS):  # sampling ahead continues to the end
        for step in range(ITERATIONS):
            scheduler.send(WeightUpdate({}, step, "", step, step))
            scheduler.next_sample(step)
            engine_seconds = sum(engine.seconds for engine in parts)
            marks.append((time.process_time() - engine_seconds, time.perf_counter()))
    (first_cpu, first), (cpu, last) = marks[0], marks[-1]
    count = ITERATIONS - 1
    return {
        "engines": engines,
        "slots": slots,
        "in_flight": in_flight,
        "cpu_seconds": (cpu - first_cpu) / count,
        "seconds": (last - first) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=512)
    parser.add_argument("--slots", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for in_flight in (False, True):
        runs = [measure(options.engines, options.slots, in_flight=in_flight) for _ in range(3)]
        results.append(min(runs, key=lambda run: run["cpu_seconds"]))
        print(json.dumps(results[-1]), flush=True)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(before | {"threads": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
