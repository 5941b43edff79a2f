"""Pieces as completed: whatever the timing, none is older than the lag, lost, or used twice."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest
import torch

from kedge.engine.rollout.as_completed import PartialBatch, chosen
from kedge.engine.rollout.collector import Sample
from kedge.engine.rollout.fifo import FifoScheduler
from kedge.engine.rollout.joining import joined, split_groups
from kedge.errors import CheckpointError, SyncError
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

from .test_staleness import Broken, Checkpoints, Run, Sampler, engine

SCHEDULES = 10_000


def simulate(number: int, *, bounded: bool = True) -> tuple[int, list[int]]:
    """A schedule on paper: durations are drawn, nothing waits.  Returns lag and ages seen."""
    rng = random.Random(number)
    lag, per_step, engines = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 6)
    tail = rng.choice([1.0, 10.0, 100.0])
    updates, now, begun, busy = 12, 0.0, 0, engines
    done: list[PartialBatch] = []
    running: list[tuple[float, int, PartialBatch]] = []
    ages: list[int] = []

    def begin(newest: int) -> None:
        nonlocal begun, busy
        bound = (newest + lag + 1) * per_step if bounded else 10**6
        while len(running) < busy and begun < min(bound, updates * per_step):
            takes = rng.random() * (tail if rng.random() < 0.2 else 1.0)
            piece = PartialBatch(number=begun, since=newest)
            heapq.heappush(running, (now + takes, begun, piece))
            begun += 1

    begin(0)
    for step in range(updates):
        while (
            picked := chosen(
                done, [p for _, _, p in running], step=step, max_lag=lag, per_step=per_step
            )
        ) is None:
            assert running, f"schedule {number} waits at step {step} for nothing"
            now, _, piece = heapq.heappop(running)
            done.append(piece)
            begin(step)
        done = [p for p in done if p not in picked]
        ages += [step - p.since for p in picked]
        now += rng.random() * per_step / engines  # training; pieces go on meanwhile
        while running and running[0][0] <= now:
            done.append(heapq.heappop(running)[2])
            begin(step)
        begin(step + 1)
    assert not done
    assert not running
    assert begun == updates * per_step
    return lag, ages


def test_no_schedule_breaks_the_bound_or_waits_for_ever() -> None:
    fresh = 0
    for number in range(SCHEDULES):
        lag, ages = simulate(number)
        assert set(ages) <= set(range(lag + 1)), f"schedule {number}"
        fresh += min(ages) < max(ages)
    assert fresh > SCHEDULES // 2  # the order of completion really differs from that of beginning


def test_without_the_rule_of_beginning_the_bound_breaks() -> None:
    def breaks(number: int) -> bool:
        try:
            lag, ages = simulate(number, bounded=False)
        except AssertionError:
            return True
        return max(ages) > lag

    assert sum(map(breaks, range(200))) > 100


class Batches:
    """Six prompts a step, two responses each; their ids name step and row."""

    def batch(self, step: int) -> PromptBatch:
        row = torch.arange(12)
        return PromptBatch(
            ids=(step * 100 + row)[:, None],
            mask=torch.ones(12, 1, dtype=torch.bool),
            group=row // 2,
            row=row,
        )


class Wide(Sampler):
    """Any number of rows."""

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        self._dawdle()
        if self.rng.random() < self.failures:
            raise Broken
        width = self.rng.randint(1, 4)
        return Rollout(
            prompts=prompts,
            ids=prompts.ids.expand(-1, width),
            loss_mask=torch.ones(len(prompts), width, dtype=torch.bool),
            response_mask=torch.ones(len(prompts), width, dtype=torch.bool),
            terminated=torch.ones(len(prompts), dtype=torch.bool),
            version=torch.full((len(prompts),), self.version),
        )


class Judge:
    def score(self, rollout: Rollout) -> Any:
        from kedge.types import RewardOutput

        rows = len(rollout)
        return RewardOutput(scores=torch.zeros(rows), valid=torch.ones(rows, dtype=torch.bool))


class Writing(Run):
    """Writes down every response that it was given."""

    def train_on(
        self, rollout: Rollout, reward_output: Any, times: Any, *, begin: Any = None
    ) -> Any:
        assert rollout.prompts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert rollout.prompts.row.tolist() == list(range(12))
        for prompt, answer, version in zip(
            rollout.prompts.ids[:, 0].tolist(), rollout.ids, rollout.version.tolist(), strict=True
        ):
            assert set(answer.tolist()) <= {prompt, 0}
            self.log.append((self.step, prompt, version))
        self.learner.version += 1  # type: ignore[misc]
        self.step += 1
        self._moves += 1
        return {}


def writing(lag: int, samplers: list[Any], pieces: int) -> Writing:
    plain = engine(lag, samplers[0])
    samplers[0].engines = samplers  # the first stands for all
    run = Writing(
        source=Batches(),
        rollout_engine=samplers[0],
        reward=Judge(),
        learner=plain.learner,
        algorithm=plain.algorithm,
        kl=plain.kl,
        batch_sizes=plain.batch_sizes,
        sampling=plain.sampling,
        max_lag=lag,
        partial_batches=pieces,
    )
    run.log = []
    return run


def threads(number: int) -> None:
    """A run with real threads, failures, stops and resumes."""
    rng = random.Random(number)
    lag, updates, pieces = rng.randint(1, 3), rng.randint(1, 6), rng.choice([1, 2, 3, 6])
    failures = rng.choice([0.0, 0.0, 0.02])
    log: list[tuple[int, int, int]] = []
    state, flight = None, []
    while True:
        samplers = [Wide(random.Random(rng.random()), failures) for _ in range(rng.randint(1, 4))]
        run = writing(lag, samplers, pieces)
        if state is not None:
            run.load_state_dict(state)
            run.restore(flight)
        hooks = Checkpoints(run, every=rng.randint(1, 3), stop=rng.randint(1, 8))
        run.hooks = hooks
        try:
            run.run(updates)
        except Broken:
            pass
        else:
            if run.step >= updates:
                log += run.log
                break
        if hooks.saved is not None:
            state, flight, kept = hooks.saved
            log += run.log[:kept]
    prompts = sorted(prompt for _, prompt, _ in log)
    assert prompts == [step * 100 + row for step in range(updates) for row in range(12)]
    assert all(0 <= step - version <= lag for step, _, version in log)


def test_threads_keep_the_bound_and_lose_nothing() -> None:
    for number in range(60):
        threads(number)


@pytest.mark.slow
def test_many_threads_keep_the_bound_and_lose_nothing() -> None:
    for number in range(60, 1500):
        threads(number)


def test_joined_pieces_are_the_batch() -> None:
    run = writing(1, [Wide(random.Random(0), 0.0)], 3)
    collector = run.scheduler.collector  # type: ignore[attr-defined]
    batch = Batches().batch(4)
    sampler = Wide(random.Random(1), 0.0)
    parts: list[Sample] = [collector.draw(4, sampler, rows) for rows in split_groups(batch, 3)]
    rollout, reward_output, times = joined(parts, batch)
    assert rollout.prompts.ids.tolist() == batch.ids.tolist()
    assert rollout.loss_mask.sum(1).tolist() == [
        part[0].loss_mask.shape[1] for part in parts for _ in range(4)
    ]
    assert len(reward_output.scores) == 12
    assert times["time/rollout"] == pytest.approx(sum(p[2]["time/rollout"] for p in parts))
    with pytest.raises(ValueError, match="6 prompts cannot be split into 4"):
        split_groups(batch, 4)


def test_a_lane_that_keeps_old_weights_is_caught() -> None:
    class Deaf(Wide):
        def load_weights(self, weights: Any, version: int) -> Receipt:
            self.version = 0
            return Receipt(version=version, fingerprint=str(version))

    with pytest.raises(SyncError, match="which it confirmed, but used version 0"):
        writing(1, [Deaf(random.Random(0), 0.0)], 2).run(4)


def test_samples_of_another_size_or_lag_are_refused_on_resume() -> None:
    sampler = Wide(random.Random(0), 0.0)
    run, batch = writing(2, [sampler], 3), Batches().batch(2)
    sampler.version = 2
    collector = run.scheduler.collector  # type: ignore[attr-defined]
    flight = [collector.draw(2, sampler, rows) for rows in split_groups(batch, 3)]
    other = writing(2, [Wide(random.Random(0), 0.0)], 6)
    other.step = 2
    with pytest.raises(CheckpointError, match="must be partial batches of 2 responses, got 4"):
        other.restore(flight)
    nearer = writing(1, [Wide(random.Random(0), 0.0)], 3)
    nearer.step = 4
    with pytest.raises(CheckpointError, match="too old for max_lag=1"):
        nearer.restore(flight)


def test_whole_batches_in_order_are_the_default() -> None:
    assert isinstance(engine(1, Sampler(random.Random(0), 0.0)).scheduler, FifoScheduler)
