"""Groups as completed: whatever the timing, none is older than the lag, lost, or used twice."""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge.records.errors import CheckpointError, SyncError
from kedge.records.protocols import EngineInfo, read_info
from kedge.records.types import (
    PromptBatch,
    Receipt,
    Rollout,
    Sample,
    Sampling,
    StepReport,
    group_rows,
)
from kedge.rollout.engines import RankGroups
from kedge.rollout.scheduler.dispatch import Dispatcher, deal
from kedge.rollout.scheduler.joining import join_groups

from .test_staleness import Broken, Checkpoints, Learner, Rescue, Run, Sampler, engine

SCHEDULES = 10_000


class Unbounded(Dispatcher):
    def _bound(self, version: int) -> int:
        return self.end


def simulate(number: int, *, bounded: bool = True) -> tuple[int, list[int]]:
    """A schedule on paper: durations are drawn, nothing waits.  Returns lag and ages seen.

    Each engine keeps its weights until it holds nothing, as engines with slots do.
    """
    rng = random.Random(number)
    lag, per_step, engines = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 6)
    slots, tail = rng.randint(1, 4), rng.choice([1.0, 10.0, 100.0])
    updates, now = 12, 0.0
    kind = Dispatcher if bounded else Unbounded
    dispatcher = kind(per_step=per_step, max_lag=lag, end=updates * per_step)
    held: list[set[int]] = [set() for _ in range(engines)]
    version = [0] * engines
    since: dict[int, int] = {}
    running: list[tuple[float, int, int]] = []  # end, group, engine
    ages: list[int] = []

    def start(newest: int) -> None:
        for i in rng.sample(range(engines), engines):
            version[i] = version[i] if held[i] else newest
            if rng.random() < 0.1 and held[i]:  # the engine dies
                dispatcher.give_back(held[i])
                running[:] = [x for x in running if x[2] != i]
                heapq.heapify(running)
                held[i].clear()
                version[i] = newest
            for group in dispatcher.start(version[i], slots - len(held[i])):
                takes = rng.random() * (tail if rng.random() < 0.2 else 1.0)
                held[i].add(group)
                since[group] = version[i]
                heapq.heappush(running, (now + takes, group, i))

    def finish(newest: int) -> None:
        nonlocal now
        at, group, i = heapq.heappop(running)
        now = max(now, at)
        held[i].remove(group)
        dispatcher.complete([group], version[i])
        start(newest)

    start(0)
    for step in range(updates):
        while (taken := dispatcher.take(step)) is None:
            assert running, f"schedule {number} waits at step {step} for nothing"
            finish(step)
        assert len(taken) == per_step
        ages += [step - since.pop(group) for group in taken]
        now += rng.random() * per_step / engines  # training; sampling continues meanwhile
        while running and running[0][0] <= now:
            finish(step)
        start(step + 1)
    assert not dispatcher.done
    assert not running
    assert dispatcher.next == updates * per_step
    return lag, ages


def test_no_schedule_breaks_the_bound_or_waits_for_ever() -> None:
    fresh = 0
    for number in range(SCHEDULES):
        lag, ages = simulate(number)
        assert set(ages) <= set(range(lag + 1)), f"schedule {number}"
        fresh += min(ages) < max(ages)
    assert fresh > SCHEDULES // 2  # the order of completion really differs from that of starting


def test_without_the_rule_of_starting_the_bound_breaks() -> None:
    def breaks(number: int) -> bool:
        try:
            lag, ages = simulate(number, bounded=False)
        except (AssertionError, KeyError):
            return True
        return max(ages) > lag

    assert sum(map(breaks, range(200))) > 100


class Batches:
    """Six prompts a step, two responses each; their ids name step and row."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rows = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)

    def whole(self) -> Batches:
        return Batches()

    def batch(self, step: int) -> PromptBatch:
        row = torch.arange(12)[self.rows]
        mask = torch.ones(len(row), 1, dtype=torch.bool)
        return PromptBatch(ids=(step * 100 + row)[:, None], mask=mask, group=row // 2, row=row)


class Ranks(RankGroups):
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size, self._mail, self._here = size, None, threading.local()
        self._barrier, self._box = threading.Barrier(size, timeout=60), [None] * size

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._here.rank

    def run_on_first(self, local: Any, work: Any) -> Any:
        self._box[self.rank] = local
        self._barrier.wait()
        if self.rank == 0:
            try:
                self._box = [(x, None) for x in work(list(self._box))]
            except Exception as error:
                self._box = [(None, error)] * self.size
        self._barrier.wait()
        found, error = self._box[self.rank]
        self._barrier.wait()
        if error is not None:
            raise error
        return found

    def run(self, job: Any) -> list[Any]:
        """The results of ``job(rank)``, called by every rank in a thread."""

        def enter(rank: int) -> Any:
            self._here.rank = rank
            return job(rank)

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(enter, range(self.size)))


def answer(prompts: PromptBatch, versions: list[int]) -> Rollout:
    """The prompt over and over, once for each version of the weights."""
    mask = torch.ones(len(prompts), len(versions), dtype=torch.bool)
    return Rollout(
        prompts=prompts,
        ids=prompts.ids.expand(-1, len(versions)),
        loss_mask=mask,
        response_mask=mask,
        terminated=mask[:, 0],
        policy_version=torch.tensor([versions[0]] * len(prompts)),
        token_version=torch.tensor([versions] * len(prompts)),
    )


class Slots(Sampler):
    """Holds single prompts, each for a few tokens; sometimes it dies and samples them again."""

    info = EngineInfo(slots=5, updates_in_flight=True)

    def __init__(self, rng: random.Random, failures: float, *, deaths: float = 0.0) -> None:
        super().__init__(rng, failures)
        self.deaths = deaths
        self.held: dict[int, PromptBatch] = {}
        self.tokens: dict[int, list[int]] = {}  # versions of the tokens of each group

    @property
    def unfinished(self) -> int:
        return sum(map(len, self.held.values()))

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        for number, rows in zip(*group_rows(prompts), strict=True):
            assert number not in self.held
            self.held[number], self.tokens[number] = prompts.rows(rows), []

    def advance(self) -> Rollout | None:
        self._dawdle()
        if self.rng.random() < self.failures:
            raise Broken
        if self.rng.random() < self.deaths:
            self.tokens = {number: [] for number in self.held}
            return None
        for versions in self.tokens.values():
            versions.append(self.version)
        done = [n for n in self.held if self.rng.random() < 0.3]
        return Rollout.cat([self._answer(n) for n in done]) if done else None

    def _answer(self, number: int) -> Rollout:
        return answer(self.held.pop(number), self.tokens.pop(number))

    def cancel(self) -> None:
        self.held.clear()
        self.tokens.clear()


class Judge:
    def score(self, rollout: Rollout) -> Any:
        from kedge.records.types import RewardOutput

        rows = len(rollout)
        return RewardOutput(scores=torch.zeros(rows), valid=torch.ones(rows, dtype=torch.bool))


class Writing(Run):
    """Writes down every response that it was given."""

    newest: list[int]  # age of the newest token of each response

    def train_on(self, sample: Sample, *, begin: float | None = None) -> dict[str, float]:
        rollout = sample.rollout
        like = self.source.batch(self.step)
        assert rollout.prompts.group.tolist() == like.group.tolist()
        assert rollout.prompts.row.tolist() == like.row.tolist()
        asked, versions = rollout.prompts.ids[:, 0].tolist(), rollout.policy_version.tolist()
        for prompt, answer, version in zip(asked, rollout.ids, versions, strict=True):
            assert set(answer.tolist()) <= {prompt, 0}
            self.log.append((self.step, prompt, version))
        newest = rollout.token_versions.where(rollout.loss_mask, -1).amax(1)
        self.newest += (self.step - newest).tolist()
        self.learner.version += 1  # type: ignore[misc]
        self.step += 1
        self._moves += 1
        return {}


def writing(
    lag: int,
    samplers: list[Any],
    *,
    in_flight: bool = False,
    kind: type[Writing] = Writing,
    ranks: Ranks | None = None,
    **parts: Any,
) -> Writing:
    plain = engine(lag, samplers[0])
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    if ranks is not None:
        plain.learner.world_size = size
        plain.learner.all_reduce = lambda x: ranks.run_on_first(x, lambda xs: [sum(xs)] * size)
    own = read_info(samplers[0], EngineInfo)  # the first stands for all
    samplers[0].info = replace(own, engines=samplers, ranks=ranks)
    run = kind(
        **{"source": Batches(rank, size), "rollout_engine": samplers[0]},
        **{"reward": parts.get("reward", Judge()), "learner": plain.learner},
        **{"algorithm": parts.get("algorithm", plain.algorithm), "kl": plain.kl},
        **{"batch_sizes": plain.batch_sizes, "sampling": plain.sampling, "max_lag": lag},
        **{"as_completed": True, "in_flight_weight_updates": in_flight},
    )
    run.log, run.newest = [], []
    return run


def threads(
    number: int, *, in_flight: bool = False, ranks: int = 1, **parts: Any
) -> tuple[list[tuple[int, int, int]], int]:
    """A run with real threads, failures, stops, resumes and engines that die.

    Returns what was trained on, and the number of iterations.
    """
    pool = None if ranks == 1 else Ranks(ranks)
    rng = random.Random(number)
    deaths = rng.choice([0.0, 0.1])
    lag, updates = rng.randint(1, 3), rng.randint(1, 6)
    failures = rng.choice([0.0, 0.0, 0.02])
    log: list[tuple[int, int, int]] = []
    saved: Any = [None] * ranks
    while True:
        samplers = [
            Slots(random.Random(rng.random()), failures, deaths=deaths)
            for _ in range(rng.randint(1, 4))
        ]
        every, stop = rng.randint(1, 3), rng.randint(1, 8)

        def work(rank: int) -> tuple[Writing, Any]:
            run = writing(lag, samplers, in_flight=in_flight, ranks=pool, **parts)  # noqa: B023
            if saved[rank] is not None:
                run.load_state_dict(saved[rank][0])
                run.restore(saved[rank][1])
            hooks = Checkpoints(run, every=every, stop=stop)  # noqa: B023
            run.hooks = [hooks]
            with contextlib.suppress(Broken):
                run.run(updates)
            return run, hooks.saved

        ended = [work(0)] if pool is None else pool.run(work)
        for rank, (run, kept) in enumerate(ended):
            saved[rank] = kept or saved[rank]
            log += run.log[: None if run.step >= updates else kept[2] if kept else 0]
            if in_flight:  # the loop bounds the age of single tokens: test_token_versions.py
                assert set(run.newest) <= set(range(lag + 1))
        if all(run.step >= updates for run, _ in ended):
            break
    if not in_flight:
        assert all(0 <= step - version <= lag for step, _, version in log)
    return log, updates


def check(number: int, **options: Any) -> None:
    log, updates = threads(number, **options)
    prompts = sorted(prompt for _, prompt, _ in log)
    assert prompts == [step * 100 + row for step in range(updates) for row in range(12)]


@pytest.mark.parametrize("in_flight", [False, True])
def test_threads_keep_the_bound_and_lose_nothing(in_flight: bool) -> None:
    for number in range(60):
        check(number, in_flight=in_flight)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_engines_keep_the_bound_and_lose_nothing(
    in_flight: bool, ranks: int
) -> None:
    for number in range(20):
        check(number, in_flight=in_flight, ranks=ranks)


def thirds(batch: PromptBatch, version: int = 0) -> list[Sample]:
    """Samples of two groups each, which have 1, 2 and 3 tokens."""
    groups, parts = group_rows(batch)[1], []
    for width in range(1, 4):
        prompts = batch.rows(torch.cat(groups[2 * width - 2 : 2 * width]))
        rollout = answer(prompts, [version] * width)
        times = {"time/rollout": float(width)}
        parts.append(Sample(rollout=rollout, reward_output=Judge().score(rollout), times=times))
    return parts


def test_joined_groups_are_the_batch() -> None:
    batch = Batches().batch(4)
    parts = thirds(batch)
    whole = join_groups(parts, batch)
    rollout = whole.rollout
    assert rollout.prompts.ids.tolist() == batch.ids.tolist()
    assert rollout.loss_mask.sum(1).tolist() == [
        part.rollout.loss_mask.shape[1] for part in parts for _ in range(4)
    ]
    assert len(whole.reward_output.scores) == 12
    assert whole.times["time/rollout"] == 6.0
    with pytest.raises(ValueError, match="got 4 groups for an iteration of 6"):
        join_groups(parts[:2], batch)


def test_a_lane_that_keeps_old_weights_is_caught() -> None:
    class Deaf(Slots):
        def load_weights(self, weights: Any, version: int) -> Receipt:
            self.version = 0
            return Receipt(version=version, fingerprint=str(version))

    with pytest.raises(SyncError, match="which it confirmed, but used version 0"):
        writing(1, [Deaf(random.Random(0), 0.0)]).run(4)


def test_weights_that_no_rank_can_evaluate_with_cost_no_finished_iteration() -> None:
    class Full(Learner):
        world_size, broken = 2, False

        def weights(self) -> dict[str, Any]:
            if self.broken:
                raise SyncError("the store is full")  # on all ranks
            return {}

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Evaluates(Rescue):
        def on_step_end(self, report: StepReport) -> bool:
            learner.broken = report.step == 2
            self.run.scheduler.wait_until_idle()  # as before an evaluation
            self.run.rollout_engine.load_weights(self.run.weights(), report.step)
            return False

    run, learner = writing(1, [Slots(random.Random(0), 0.0)]), Full()
    run.learner = learner  # type: ignore[assignment]
    hooks = Evaluates(run, every=99, stop=99)
    run.hooks = [hooks]
    with pytest.raises(SyncError, match="the store is full"):
        run.run(4)
    assert hooks.saved is not None
    assert hooks.saved[0]["step"] == 2


def test_samples_of_another_size_or_lag_are_refused_on_resume() -> None:
    flight = thirds(Batches().batch(2), version=2)
    single = [flight[0].rows(torch.tensor([0, 1, 2]))]
    other = writing(2, [Slots(random.Random(0), 0.0)])
    other.step = 2
    with pytest.raises(CheckpointError, match="must have 2 responses per prompt, got 1"):
        other.restore(single)
    nearer = writing(1, [Slots(random.Random(0), 0.0)])
    nearer.step = 4
    with pytest.raises(CheckpointError, match="too old for max_lag=1"):
        nearer.restore(flight)


def test_groups_are_dealt_by_tokens():
    assert deal({0: 2, 1: 5, 2: 2, 3: 4}, 2) == [[1, 2], [3, 0]]  # 7 and 6 tokens
