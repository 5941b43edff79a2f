"""How much of the engines' time the scheduling of rollouts uses, on a virtual clock.

    python -m benchmarks.dispatch         # simulation, and the cost of the scheduler
    python -m benchmarks.dispatch bounds  # what no drain, and the longest response, would permit
    python -m benchmarks.dispatch repack  # what moving the last responses of a drain would gain
    python -m benchmarks.dispatch steps   # seconds of a token step of vLLM by running requests
    python -m benchmarks.dispatch learners  # 16 learners that share engines, and one
    python -m benchmarks.dispatch vllm    # requests one by one against whole batches, in vLLM

The scheduling is Kedge's (``kedge.rollout.scheduler.dispatch``); engines are pretended.  A token
step of an engine that samples n of its 64 slots takes 1 - load + load n / 64 units of time: with
load 0 as much as a full engine, as where decoding is bound by reading the weights; with load 0.67 a
third of it for a single response, as where the cache of a full engine is twice the weights.
Lengths are lognormal with median 600, cut at 8,192 tokens.  Training takes as long as sampling at
full slots, which is the ideal; every figure is ideal time / time, for tokens that are trained on.
``results/dispatch_check.json`` is of a simulator without a line of this file or of Kedge.
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
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kedge.records.types import PromptBatch, RewardOutput, Rollout, Sample, Sampling, group_rows
from kedge.rollout.scheduler.dispatch import Dispatcher, deal
from kedge.rollout.scheduler.joining import SampleStore

RESULTS = Path(__file__).parent / "records" / "dispatch.json"
MEDIAN, CAP, SIGMAS, LOADS, SLOTS, GROUP = 600, 8192, (0.985, 0.5), (0.0, 0.67), 64, 8
PAUSE = 0.02  # of the ideal time of an iteration, for each weight update in flight
PREFILL = 0.01  # steps of a full engine to read one token of a response that moved


@dataclass(slots=True)
class PretendEngine:
    """An engine with a clock of token steps, which runs slower the more rows there are."""

    version: int = 0
    held: dict[int, int] = field(default_factory=dict)  # group -> rows that are not complete
    rows: int = 0
    steps: float = 0.0  # token steps until ``at``
    at: float = 0.0
    ends: list[tuple[float, int, int]] = field(default_factory=list)  # step, group, length
    loads: list[float] = field(default_factory=lambda: [0.0])  # step at which a version came
    stamp: int = 0  # of its newest event; others are void


class Simulation:
    """A run of pretended engines and of training, on a clock that counts steps of full engines.

    Args:
        engines: number of engines; an iteration has ``engines * SLOTS`` rows.
        max_lag: iterations that sampling may be ahead.
        in_flight: weights change under way; otherwise an engine first completes what it holds.
        sigma: of the logarithm of lengths.
        load: share of the time of a full engine's step that is proportional to its rows.
        drains: without, an engine would hold weights of several versions, and start every response
            with the newest: no schedule of responses of one version starts them earlier.
        repack: an engine that must complete what it holds gives it to another one with the same
            weights, if both together hold at most so many rows; 0: never.
        stale: versions by which weights may be older before an engine must load; None: Kedge's.
        seed: of lengths.
    """

    def __init__(
        self,
        *,
        engines: int,
        max_lag: int,
        in_flight: bool = False,
        sigma: float = SIGMAS[0],
        load: float = LOADS[1],
        drains: bool = True,
        repack: int = 0,
        stale: int | None = None,
        seed: int = 0,
    ) -> None:
        self.in_flight, self.max_lag, self.load = in_flight, max_lag, load
        self.drains, self.repack = drains, repack
        self.stale = max_lag // 2 if stale is None else stale
        self.rng = random.Random(seed)
        self.lengths = [
            min(CAP, max(1, round(self.rng.lognormvariate(math.log(MEDIAN), sigma))))
            for _ in range(200_000)
        ]
        self.ideal = statistics.fmean(self.lengths)
        self.dispatcher = Dispatcher(
            per_step=engines * SLOTS // GROUP, max_lag=max_lag, in_flight=in_flight, end=10**9
        )
        self.engines = [PretendEngine() for _ in range(engines)]
        self.events: list[tuple[float, int, int]] = []  # a row ends: time, engine, stamp
        self.sampling = self.newest = 0
        self.now = 0.0
        self.paused = 0.0  # until now; engines do not see this time
        self.groups: dict[int, tuple[int, float, list[int]]] = {}  # engine, first step, lengths
        self.ages: Counter[int] = Counter()  # tokens by age in iterations

    def run(self, iterations: int, warm_up: int) -> dict[str, float]:
        """Shares of the ideal, and ages of tokens."""
        begin = 0.0
        self.refill_all()
        for step in range(iterations + warm_up):
            if step == warm_up:
                begin = self.now
                self.ages.clear()
            while (taken := self.dispatcher.take(step)) is None:
                self.advance()
            self.count(taken, step)
            self.train(step)
        share = iterations * self.ideal / (self.now - begin)
        tokens = self.ages.total()
        old = sum(n for age, n in self.ages.items() if age > self.max_lag) / tokens
        return {
            "trained": share,  # every token
            "too_old_tokens": old,
            "trained_mask_old": share * (1 - old),
            "mean_age": sum(age * n for age, n in self.ages.items()) / tokens,
        }

    def train(self, step: int) -> None:
        """Train for the ideal time, while engines sample, then send the new weights."""
        end = self.now + self.ideal
        while self.next_event() + self.paused <= end:
            if self.in_flight and self.dispatcher.room(self.newest) <= 0:
                self.paused += end - self.now
                break
            self.advance()
        pause = PAUSE * self.ideal if self.in_flight else 0.0
        self.paused += pause
        self.now, self.newest = end + pause, step + 1
        self.refill_all()

    def refill_all(self) -> None:
        """Offer groups to all engines, in random order."""
        for index in self.rng.sample(range(len(self.engines)), len(self.engines)):
            self.refill(index)

    def refill(self, index: int) -> None:
        """Load weights if the engine may, and start groups in its free slots."""
        engine = self.engines[index]
        if self.repack and engine.held and self.newest - engine.version > self.stale:
            self.move(index)
        if engine.version < self.newest and (self.in_flight or not self.drains or not engine.held):
            self.sync(engine)
            engine.loads += [engine.steps] * (self.newest + 1 - len(engine.loads))
            engine.version = self.newest
            self.dispatcher.reload(engine.held if self.in_flight else (), self.newest)
        if not self.in_flight and self.newest - engine.version > self.stale:
            return
        limit = (SLOTS - engine.rows) // GROUP
        if self.in_flight:
            limit = min(limit, int(self.dispatcher.room(self.newest, self.sampling / GROUP)))
        started = self.dispatcher.start(engine.version, max(0, limit))
        self.sync(engine)
        for number in started:
            lengths = [self.rng.choice(self.lengths) for _ in range(GROUP)]
            self.groups[number] = index, engine.steps, lengths
            engine.held[number] = GROUP
            engine.rows += GROUP
            self.sampling += GROUP
            for length in lengths:
                heapq.heappush(engine.ends, (engine.steps + length, number, length))
        if started:
            self.schedule(index)

    def move(self, index: int) -> None:
        """Give all rows of the engine to another one with its weights, as tokens."""
        engine, best = self.engines[index], None
        for other in self.engines:
            fits = other.version == engine.version and other.rows + engine.rows <= self.repack
            if (
                other is not engine
                and other.held
                and fits
                and other.rows > getattr(best, "rows", 0)
            ):
                best = other
        if best is None:
            return
        self.sync(engine), self.sync(best)
        place = self.engines.index(best)
        for end, number, length in engine.ends:
            rest = max(0.0, end - engine.steps)
            heapq.heappush(best.ends, (best.steps + rest, number, length))
            best.at += PREFILL * (length - rest)
        best.held |= engine.held
        best.rows += engine.rows
        engine.held, engine.rows, engine.ends = {}, 0, []
        self.schedule(index), self.schedule(place)

    def seconds(self, engine: PretendEngine) -> float:
        """Time of one token step."""
        return 1 - self.load + self.load * engine.rows / SLOTS

    def sync(self, engine: PretendEngine) -> None:
        """Bring the engine's clock to now."""
        now = self.now - self.paused
        if engine.rows and now > engine.at:
            engine.steps += (now - engine.at) / self.seconds(engine)
        engine.at = max(engine.at, now)

    def schedule(self, index: int) -> None:
        """Replace the engine's event: its next row ends."""
        engine = self.engines[index]
        engine.stamp += 1
        if engine.ends:
            wait = max(0.0, engine.ends[0][0] - engine.steps) * self.seconds(engine)
            heapq.heappush(self.events, (engine.at + wait, index, engine.stamp))

    def next_event(self) -> float:
        """Time of the next event, in the time of engines."""
        while self.events and self.events[0][2] != self.engines[self.events[0][1]].stamp:
            heapq.heappop(self.events)
        return self.events[0][0] if self.events else math.inf

    def advance(self) -> None:
        """The next row ends."""
        self.now = max(self.now, self.next_event() + self.paused)
        index = heapq.heappop(self.events)[1]
        engine = self.engines[index]
        self.sync(engine)
        end, number, _ = heapq.heappop(engine.ends)
        engine.steps = max(engine.steps, end)
        engine.rows -= 1
        self.sampling -= 1
        engine.held[number] -= 1
        if not engine.held[number]:
            del engine.held[number]
            since = self.dispatcher.running[number]
            self.dispatcher.complete([number], engine.version if self.in_flight else since)
            if not self.in_flight:
                self.groups[number] = since, 0.0, self.groups[number][2]
        self.refill(index)
        self.schedule(index)

    def count(self, taken: list[int], step: int) -> None:
        """Count the tokens that are trained on, by age."""
        for number in taken:
            place, begin, lengths = self.groups.pop(number)
            if not self.in_flight:
                self.ages[step - place] += sum(lengths)
                continue
            loads = [*self.engines[place].loads, math.inf]
            for version in range(len(loads) - 2, -1, -1):
                first, last = max(loads[version], begin), loads[version + 1]
                self.ages[step - version] += sum(
                    max(0, round(min(last, begin + n) - first)) for n in lengths
                )
                if first == begin:
                    break


def run_case(rounds: int = 0, **case: Any) -> dict[str, Any]:
    """A row of the table: the figures of a simulation with these arguments."""
    rounds = rounds or {8: 60, 64: 16}.get(case["engines"], 4)
    figures = Simulation(**case).run(rounds, 6 + 2 * case["max_lag"])
    result = case | {name: round(x, 4) for name, x in figures.items()}
    print(json.dumps(result), flush=True)
    return result


def simulate() -> list[dict[str, Any]]:
    """All figures of the simulation, for one learner."""
    names = ("engines", "sigma", "load", "in_flight", "max_lag")
    cases = [*itertools.product((8, 64), SIGMAS, LOADS, (False, True), (1, 2, 4, 8))]
    cases += itertools.product((512,), SIGMAS[:1], LOADS[:1], (False, True), (2, 4))  # minutes
    return [run_case(**dict(zip(names, case, strict=True))) for case in cases]


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
        tokens = {n: sum(self.groups[n][2]) for n in taken}
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
            made = Learners(number, dealing, engines=16, load=LOADS[0], **case)
            run = made.run(60, warm_up)
            found[name] = run["trained"]
            found[f"{name}_mask_old"] = run["trained_mask_old"]
            found[f"{name}_slowest"] = statistics.mean(made.slowest[warm_up + 1 :])
        results.append(found)
        print(json.dumps(results[-1]), flush=True)
    return results


def dealing_seconds(ranks: int = 16, rows: int = 1024) -> dict[str, float]:
    """CPU seconds of rank 0 for one iteration of several learners, and bytes for each other one.

    Groups are added to the store, one by one, as they are scored; then all are dealt and pickled.
    """
    made = Simulation(engines=1, max_lag=1, in_flight=True)
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
            policy_version=torch.zeros(8, dtype=torch.int64),
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
    complete before the training that is ``max_lag`` iterations later begins; alone in its engine.
    """
    results = []
    for load, engines, lag in itertools.product(LOADS, (8, 64), (1, 2, 4, 8)):
        case = {"engines": engines, "max_lag": lag, "sigma": SIGMAS[0], "load": load}
        simulation = Simulation(**case, drains=False)
        draws = [simulation.rng.choices(simulation.lengths, k=engines * SLOTS) for _ in range(100)]
        longest = statistics.mean(map(max, draws)) * (1 - load + load / SLOTS)
        share = run_case(60 if engines == 8 else 20, **case, drains=False)["trained"]
        bound = min(1.0, (lag + 1) / (longest / simulation.ideal + 1))
        results.append({**case, "several_versions": share, "longest": round(bound, 4)})
        print(json.dumps(results[-1]), flush=True)
    return results


def repack() -> list[dict[str, Any]]:
    """Draining engines that give their last responses to one with the same weights."""
    cases = itertools.product((8, 64), (4, 8), (0, 8, 16, 64))
    rounds = {8: 60, 64: 8}
    return [run_case(rounds[e], engines=e, max_lag=lag, repack=rows) for e, lag, rows in cases]


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


def vllm_steps() -> dict[str, dict[int, float]]:
    """CPU milliseconds of a token step of vLLM by the number of running requests.

    A Llama of 87 million random weights, prompts of 16 tokens, 64 steps, one thread.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kedge.ext.vllm import InProcess, PolicyTemplate, VLLMEngine

    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3, "vocab_size": 8192}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads))
    template = PolicyTemplate.of(model)
    engine = VLLMEngine(InProcess(template, dict(model.state_dict())), template, pad_id=0)

    def seconds(rows: int, tokens: int) -> float:
        ids, numbers = torch.randint(3, 8000, (rows, 16)), torch.arange(rows)
        mask = torch.ones_like(ids, dtype=torch.bool)
        batch = PromptBatch(ids=ids, mask=mask, group=numbers, row=numbers)
        begin = time.process_time()
        engine.generate(batch, sampling=Sampling(max_new_tokens=tokens), seed=1)
        return time.process_time() - begin

    seconds(8, 8)
    timed = {n: [[seconds(n, k) for _ in range(3)] for k in (8, 72)] for n in (1, 8, 16, 32, 64)}
    of_row = {n: [statistics.median(x) for x in pair] for n, pair in timed.items()}
    return {"cpu_ms_by_rows": {n: 1e3 * (x[1] - x[0]) / 64 for n, x in of_row.items()}}


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
    kinds = ("simulation", "bounds", "repack", "steps", "learners", "vllm")
    parser.add_argument("what", nargs="?", choices=kinds, default="simulation")
    what = parser.parse_args().what
    if what == "vllm":
        results: Any = {"vllm": vllm_seconds()}
    elif what == "steps":
        results = {"steps": vllm_steps()}
    elif what in ("bounds", "repack"):
        results = {what: {"bounds": bounds, "repack": repack}[what]()}
    elif what == "learners":
        results = {
            "dealing_seconds": [dealing_seconds() for _ in range(2)][-1],  # the first warms up
            "learners": learners(),
        }
    else:
        results = {"scheduler_seconds": scheduler_seconds(), "simulation": simulate()}
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(before | results, indent=1) + "\n")
    print(
        json.dumps(
            {k: v for k, v in results.items() if k in ("vllm", "steps", "scheduler_seconds")}
        )
    )


if __name__ == "__main__":
    main()
