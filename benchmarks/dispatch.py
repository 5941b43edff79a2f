"""How much of the engines' time the scheduling of rollouts uses, on a virtual clock.

    python -m benchmarks.dispatch         # simulation, and the cost of the scheduler
    python -m benchmarks.dispatch bounds  # what no drain, and the longest response, would permit
    python -m benchmarks.dispatch learners  # 16 learners that share engines, and one
    python -m benchmarks.dispatch vllm    # requests one by one against whole batches, in vLLM

The scheduling is Kedge's (``kedge.rollout.scheduler.dispatch``); engines are pretended.  A token
step of an engine takes one unit of time, however many of its slots are used, as where decoding is
bound by reading the weights.  Lengths are lognormal with median 600, cut at 8,192 tokens.  Training
takes as long as sampling at full slots, which is the ideal;
every figure is ideal time / time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import pickle
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kedge.rollout.scheduler.dispatch import Dispatcher, deal
from kedge.rollout.scheduler.joining import SampleStore
from kedge.types import PromptBatch, RewardOutput, Rollout, Sample, Sampling, group_rows

RESULTS = Path(__file__).parent / "results" / "dispatch.json"
MEDIAN, CAP, SIGMAS = 600, 8192, (0.985, 0.5)
PAUSE = 0.02  # of the ideal time of an iteration, for each weight update in flight


@dataclass(slots=True)
class PretendEngine:
    """Slots, and the version of the weights."""

    free: int
    version: int = 0
    held: dict[int, int] = field(default_factory=dict)  # group -> rows that are not complete


class Simulation:
    """A run of pretended engines and of training, on a clock that counts tokens.

    Args:
        engines: number of engines.
        slots: rows that each samples at once; an iteration has ``engines * slots`` rows.
        max_lag: iterations that sampling may be ahead.
        in_flight: weights change under way; otherwise an engine first completes what it holds.
        sigma: of the logarithm of lengths.
        group: rows per prompt.
        drains: without, an engine would hold weights of several versions, and start every response
            with the newest: no schedule of responses of one version starts them earlier.
    """

    def __init__(
        self,
        *,
        engines: int,
        slots: int,
        max_lag: int,
        in_flight: bool,
        sigma: float,
        group: int,
        drains: bool = True,
    ) -> None:
        self.in_flight, self.max_lag, self.group = in_flight, max_lag, group
        self.drains = drains
        self.rng = random.Random(0)
        self.lengths = [
            min(CAP, max(1, round(self.rng.lognormvariate(math.log(MEDIAN), sigma))))
            for _ in range(200_000)
        ]
        self.ideal = sum(self.lengths) / len(self.lengths)
        self.dispatcher = Dispatcher(
            per_step=engines * slots // group, max_lag=max_lag, in_flight=in_flight, end=10**9
        )
        self.engines = [PretendEngine(slots) for _ in range(engines)]
        self.events: list[tuple[float, int, int]] = []  # a row ends: time, engine, group
        self.sampling = self.newest = self.tokens = self.too_old = 0
        self.now = 0.0
        self.paused = 0.0  # until now; engines do not see this time
        self.begins: dict[int, list[tuple[float, int]]] = {}  # rows of a group: begin, length
        self.started: dict[int, int] = {}  # group -> version
        self.updates = [0.0]  # when each version was loaded, in the time of engines

    def run(self, iterations: int, warm_up: int) -> dict[str, float]:
        """Share of the ideal, of tokens that are too old, and CPU seconds per iteration."""
        begin_time = begin_cpu = 0.0
        self.refill_all()
        for step in range(iterations):
            if step == warm_up:
                begin_time, begin_cpu = self.now, time.process_time()
                self.tokens = self.too_old = 0
            while (taken := self.dispatcher.take(step)) is None:
                self.advance()
            self.count(taken, step)
            self.train(step)
        steps = iterations - warm_up
        return {
            "share": steps * self.ideal / (self.now - begin_time),
            "too_old_tokens": self.too_old / (self.tokens + self.too_old),
            "cpu_seconds": (time.process_time() - begin_cpu) / steps,
        }

    def train(self, step: int) -> None:
        """Train for the ideal time, while engines sample, then send the new weights."""
        end = self.now + self.ideal
        while self.events and self.events[0][0] + self.paused <= end:
            if self.in_flight and self.dispatcher.room(self.newest) <= 0:
                self.paused += end - self.now
                break
            self.advance()
        pause = PAUSE * self.ideal if self.in_flight else 0.0
        self.paused += pause
        self.now, self.newest = end + pause, step + 1
        self.updates.append(self.now - self.paused)
        self.refill_all()

    def refill_all(self) -> None:
        """Offer groups to all engines, in random order."""
        for index in self.rng.sample(range(len(self.engines)), len(self.engines)):
            self.refill(index)

    def refill(self, index: int) -> None:
        """Start groups in the free slots of an engine."""
        engine, group = self.engines[index], self.group
        if engine.version < self.newest and (self.in_flight or not engine.held):
            engine.version = self.newest
            self.dispatcher.reload(engine.held, self.newest)
        if not self.drains:
            engine.version = self.newest
        if not self.dispatcher.may_start(engine.version, self.newest):
            return
        limit = engine.free // group
        if self.in_flight:
            limit = min(limit, int(self.dispatcher.room(self.newest, self.sampling / group)))
        for number in self.dispatcher.start(engine.version, max(0, limit)):
            engine.free -= group
            self.sampling += group
            engine.held[number] = group
            self.started[number] = engine.version
            begin = self.now - self.paused
            self.begins[number] = [(begin, self.rng.choice(self.lengths)) for _ in range(group)]
            for _, length in self.begins[number]:
                heapq.heappush(self.events, (begin + length, index, number))

    def advance(self) -> None:
        """The next row ends."""
        at, index, number = heapq.heappop(self.events)
        self.now = max(self.now, at + self.paused)
        engine = self.engines[index]
        engine.free += 1
        self.sampling -= 1
        engine.held[number] -= 1
        if not engine.held[number]:
            del engine.held[number]
            started = self.started.pop(number)
            self.dispatcher.complete([number], started if not self.drains else engine.version)
        if engine.free >= self.group:
            self.refill(index)

    def count(self, taken: list[int], step: int) -> None:
        """Count the tokens that are trained on, and those older than ``max_lag``."""
        oldest = self.updates[max(0, step - self.max_lag)]
        for number in taken:
            for begin, length in self.begins.pop(number):
                old = min(length, max(0, round(oldest - begin))) if self.in_flight else 0
                self.too_old += old
                self.tokens += length - old


def simulate() -> list[dict[str, Any]]:
    """All figures of the simulation."""
    results = []
    cases = itertools.product((8, 64, 512), (1, 2, 4, 8), (False, True), SIGMAS, (8, 1))
    for engines, lag, in_flight, sigma, group in cases:
        if engines > 8 and group == 1:
            continue  # minutes, and nearly the figures of 8 engines
        case = {"engines": engines, "max_lag": lag, "in_flight": in_flight, "sigma": sigma}
        simulation = Simulation(**case, slots=64, group=group)
        warm_up = 6 + 2 * lag
        rounds = 4 if engines == 512 else 12
        results.append({**case, "group": group} | simulation.run(warm_up + rounds, warm_up))
        print(json.dumps(results[-1]), flush=True)
    return results


class Learners(Simulation):
    """Several learners: groups are dealt to them, and each iteration lasts as long as the slowest.

    Args:
        learners: number of them.
        dealing: tokens of each group and number of learners -> the groups of each.
    """

    def __init__(self, learners: int, dealing: Any, **case: Any) -> None:
        super().__init__(**case)
        self.learners, self.dealing, self.slowest = learners, dealing, [1.0]

    def count(self, taken: list[int], step: int) -> None:
        tokens = {n: sum(length for _, length in self.begins[n]) for n in taken}
        shares = [sum(map(tokens.__getitem__, own)) for own in self.dealing(tokens, self.learners)]
        self.slowest.append(max(shares) / statistics.mean(shares))
        super().count(taken, step)

    def train(self, step: int) -> None:
        ideal = self.ideal
        self.ideal *= self.slowest[-1]
        super().train(step)
        self.ideal = ideal


def in_order(tokens: dict[int, int], ranks: int) -> list[list[int]]:
    """Groups as they were done, whatever their tokens: for comparison."""
    return [list(tokens)[rank::ranks] for rank in range(ranks)]


def learners() -> list[dict[str, Any]]:
    """Share of the ideal that one learner and 16 that share the same 16 engines train with."""
    results = []
    cases = itertools.product(SIGMAS, (1, 2, 4, 8), (False, True))
    for sigma, lag, in_flight in cases:
        case = {"max_lag": lag, "in_flight": in_flight, "sigma": sigma}
        warm_up = 6 + 2 * lag
        found: dict[str, Any] = dict(case)
        for name, number, dealing in (
            ("one", 1, deal),
            ("sixteen", 16, deal),
            ("by_order", 16, in_order),
        ):
            made = Learners(number, dealing, engines=16, slots=64, group=8, **case)
            run = made.run(warm_up + 60, warm_up)
            found[name] = run["share"]
            found[f"{name}_trained"] = run["share"] * (1 - run["too_old_tokens"])
            found[f"{name}_slowest"] = statistics.mean(made.slowest[warm_up + 1 :])
        results.append(found)
        print(json.dumps(results[-1]), flush=True)
    return results


def dealing_seconds(ranks: int = 16, rows: int = 1024) -> dict[str, float]:
    """CPU seconds of rank 0 for one iteration of several learners, and bytes for each other one.

    Groups are added to the store, one by one, as they are scored; then all are dealt and pickled.
    """
    made = Simulation(engines=1, slots=64, max_lag=1, in_flight=True, sigma=SIGMAS[0], group=8)
    samples = []
    for number in range(rows // 8):
        lengths = torch.tensor([made.rng.choice(made.lengths) for _ in range(8)])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        prompt = torch.ones(8, 200, dtype=torch.bool)
        rollout = Rollout(
            prompts=PromptBatch(
                ids=prompt.long(),
                mask=prompt,
                group=torch.full((8,), number),
                row=torch.arange(number * 8, number * 8 + 8),
            ),
            ids=torch.zeros(mask.shape, dtype=torch.int64),
            loss_mask=mask,
            response_mask=mask,
            terminated=mask[:, 0],
            version=torch.zeros(8, dtype=torch.int64),
            behavior_logprobs=torch.zeros(mask.shape),
        )
        output = RewardOutput(scores=torch.zeros(8), valid=torch.ones(8, dtype=torch.bool))
        samples.append(Sample(rollout=rollout, reward_output=output))
    store, begin = SampleStore(), time.process_time()
    for sample in samples:
        store.add(sample)
    added = time.process_time()
    dealt = deal({n: store.tokens(n) for n in range(len(samples))}, ranks)
    parts = [store.take(own) for own in dealt]
    taken = time.process_time()
    pickled = [len(pickle.dumps(part)) for part in parts]
    return {
        "add": added - begin,
        "deal": taken - added,
        "pickle": time.process_time() - taken,
        "bytes": statistics.mean(pickled),
    }


def bounds() -> list[dict[str, Any]]:
    """Shares of the ideal that responses of one version permit.

    ``several_versions``: engines that need not complete what they hold before they load weights.
    ``longest``: the longest response of an iteration, started as soon as its weights exist, must be
    complete before the training that is ``max_lag`` iterations later begins.
    """
    results = []
    for sigma, engines, lag in itertools.product(SIGMAS, (8, 64), (1, 2, 4, 8)):
        case = {"engines": engines, "max_lag": lag, "sigma": sigma}
        simulation = Simulation(**case, slots=64, group=8, in_flight=False, drains=False)
        draws = [simulation.rng.choices(simulation.lengths, k=engines * 64) for _ in range(100)]
        longest = statistics.mean(map(max, draws))
        share = simulation.run(18 + 2 * lag, 6 + 2 * lag)["share"]
        bound = min(1.0, (lag + 1) / (longest / simulation.ideal + 1))
        results.append({**case, "several_versions": share, "longest": bound})
        print(json.dumps(results[-1]), flush=True)
    return results


def scheduler_seconds(engines: int = 512, slots: int = 256, group: int = 8) -> float:
    """CPU seconds of an iteration in the scheduler alone: every group is started and completed.

    Groups are completed one by one, and each time the scheduler is asked for a batch.
    """
    per_step = engines * slots // group
    dispatcher = Dispatcher(per_step=per_step, max_lag=2, end=10 * per_step)
    begin = time.process_time()
    for step in range(3):
        held = [dispatcher.start(step, slots // group) for _ in range(engines)]
        for numbers in zip(*held, strict=True):
            for number in numbers:
                dispatcher.complete([number], step)
                taken = dispatcher.take(step)
        assert taken is not None
    return (time.process_time() - begin) / 3


def vllm_seconds() -> dict[str, float]:
    """Tokens per CPU second of vLLM: 256 prompts in whole batches of 64, and one by one."""
    from tests.contract.embedded import prompts
    from tests.contract.engines import vllm_of

    engine: Any = vllm_of()
    sampling = Sampling(max_new_tokens=120, stop_ids=(5, 6))
    batches = [numbered(prompts([7, 3, 5, 1, 6, 2, 4, 7], copies=8), 100 * n) for n in range(4)]
    engine.generate(batches[0], sampling=sampling, seed=9)
    rates: dict[str, list[float]] = {"whole": [], "one_by_one": []}
    for seed in range(3):
        begin = time.process_time()
        parts = [engine.generate(b, sampling=sampling, seed=seed) for b in batches]
        seconds = time.process_time() - begin
        rates["whole"].append(sum(int(p.loss_mask.sum()) for p in parts) / seconds)
        begin = time.process_time()
        tokens, groups = 0, [g for b in batches for g in groups_of(b)]
        while groups or engine.unfinished:
            while groups and engine.unfinished < 64:
                engine.submit(groups.pop(0), sampling=sampling, seed=seed)
            rollout = engine.advance()
            tokens += 0 if rollout is None else int(rollout.loss_mask.sum())
        rates["one_by_one"].append(tokens / (time.process_time() - begin))
    return {name: statistics.median(rate) for name, rate in rates.items()}


def numbered(batch: PromptBatch, first: int) -> PromptBatch:
    return replace(batch, group=batch.group + first)


def groups_of(batch: PromptBatch) -> list[PromptBatch]:
    return [batch.rows(rows) for rows in group_rows(batch)[1]]


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = ("simulation", "bounds", "learners", "vllm")
    parser.add_argument("what", nargs="?", choices=kinds, default="simulation")
    what = parser.parse_args().what
    if what == "vllm":
        results: Any = {"vllm": vllm_seconds()}
    elif what == "bounds":
        results = {"bounds": bounds()}
    elif what == "learners":
        results = {
            "dealing_seconds": [dealing_seconds() for _ in range(2)][-1],  # the first warms up
            "learners": learners(),
        }
    else:
        results = {"scheduler_seconds": scheduler_seconds(), "simulation": simulate()}
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(before | results, indent=1) + "\n")
    print(json.dumps({k: v for k, v in results.items() if k in ("vllm", "scheduler_seconds")}))


if __name__ == "__main__":
    main()
