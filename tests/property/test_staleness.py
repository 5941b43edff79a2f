"""Thousands of schedules of a fake engine and learner: the staleness bound is never broken.

Delays, failures of the sampler, stops at any update and resumes from the last checkpoint, in any
order; every batch is trained on once, in its turn, and is exactly as old as the lag allows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge.loop.loop import Engine
from kedge.records.protocols import Hook
from kedge.records.types import (
    PromptBatch,
    Receipt,
    RewardOutput,
    Rollout,
    Sample,
    Sampling,
    StepReport,
)

ONE = torch.ones(1, 1, dtype=torch.bool)
SCHEDULES = 2_500  # 10,000 pass, too, in four times the time


class Broken(Exception):
    """The sampler failed."""


class Prompts:
    """The prompt of a step is its number."""

    def batch(self, step: int) -> PromptBatch:
        number = torch.tensor([step])
        return PromptBatch(ids=number[:, None], mask=ONE, group=number, row=number)


class Sampler:
    """Answers with the version it holds; slow, and failing, as a schedule says."""

    shares_weights = False
    logprob_kind = "none"

    def __init__(self, rng: random.Random, failures: float) -> None:
        self.rng, self.failures, self.version = rng, failures, -1

    def _dawdle(self) -> None:
        if self.rng.random() < 0.02:
            time.sleep(self.rng.random() * 1e-3)

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        self._dawdle()
        if self.rng.random() < self.failures:
            raise Broken
        return Rollout(
            prompts=prompts,
            ids=prompts.ids,
            loss_mask=ONE,
            response_mask=ONE,
            terminated=ONE[0],
            policy_version=torch.tensor([self.version]),
        )

    def load_weights(self, weights: Mapping[str, Any], version: int) -> Receipt:
        self._dawdle()
        self.version = version
        return Receipt(version=version, fingerprint=str(version))


class Learner:
    """Its weights are its version."""

    rank, world_size, low_precision, shares_prompts = 0, 1, False, False

    def __init__(self) -> None:
        self.version = 0

    def weights(self) -> dict[str, Any]:
        return {}

    def fingerprint(self) -> str:
        return str(self.version)

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


class Judge:
    """Fails as a schedule says."""

    def __init__(self, rng: random.Random | None = None, failures: float = 0.0) -> None:
        self.rng, self.failures = rng, failures

    def score(self, rollout: Rollout) -> RewardOutput:
        if self.rng is not None and self.rng.random() < self.failures:
            raise Broken
        return RewardOutput(scores=torch.zeros(1), valid=ONE[0])


class Run(Engine):
    """The loop, with an update that only writes down what it was given."""

    log: list[tuple[int, int, int]]

    def train_on(self, sample: Sample, *, begin: float | None = None) -> dict[str, float]:
        rollout = sample.rollout
        self.log.append((self.step, int(rollout.prompts.ids), int(rollout.policy_version)))
        assert isinstance(self.learner, Learner)
        self.learner.version += 1
        self.step += 1
        self._moves += 1
        return {}


class Checkpoints(Hook):
    """Keeps state and what is in flight every few updates, and stops where a schedule says."""

    def __init__(self, run: Run, every: int, stop: int) -> None:
        self.run, self.every, self.stop = run, every, stop
        self.saved: tuple[dict[str, Any], list[Sample], int] | None = None

    def on_step_end(self, report: StepReport) -> bool:
        if report.step % self.every == 0 or report.step == self.stop:
            self.saved = (self.run.state_dict(), self.run.in_flight, len(self.run.log))
        return report.step == self.stop


class Rescue(Checkpoints):
    """Keeps them too when the run fails."""

    def on_failure(self, step: int, error: Exception) -> None:
        self.saved = (self.run.state_dict(), self.run.in_flight, len(self.run.log))


def engine(lag: int, sampler: Sampler) -> Run:
    run = Run(
        source=Prompts(),
        rollout_engine=sampler,  # type: ignore[arg-type]
        reward=Judge(),
        learner=Learner(),  # type: ignore[arg-type]
        algorithm=SimpleNamespace(needs_greedy=False, resample=0, min_group=1, name="none"),  # type: ignore[arg-type]
        kl=SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None),  # type: ignore[arg-type]
        batch_sizes=SimpleNamespace(group=1, epoch_length=9),  # type: ignore[arg-type]
        sampling=Sampling(max_new_tokens=1),
        max_lag=lag,
    )
    run.log = []
    return run


def schedule(number: int, *, rescue: bool = False) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Run schedule ``number`` to its end: lag, updates, what was trained on.

    With ``rescue`` the reward fails instead of the sampler, and the run always goes on from what
    was in flight then; otherwise what came after the last checkpoint is lost with the process.
    """
    rng = random.Random(number)
    lag, updates = rng.randint(0, 4), rng.randint(1, 8)
    failures = 0.0 if rescue else rng.choice([0.0, 0.0, 0.1, 0.3])
    log: list[tuple[int, int, int]] = []
    state: dict[str, Any] | None = None
    flight: list[Sample] = []
    while True:
        run = engine(lag, Sampler(rng, failures))
        if rescue:
            run.reward = Judge(rng, rng.choice([0.1, 0.5]))
        if state is not None:
            run.load_state_dict(state)
            run.restore(flight)
        hooks = (
            Rescue(run, every=99, stop=99)
            if rescue
            else Checkpoints(run, every=rng.randint(1, 3), stop=rng.randint(1, 12))
        )
        run.hooks = [hooks]
        try:
            run.run(updates)
        except Broken:
            assert hooks.saved is not None or not rescue
        else:
            if run.step >= updates:
                return lag, updates, log + run.log
        if hooks.saved is not None:
            state, flight, kept = hooks.saved
            log += run.log[:kept]


def check(number: int, *, rescue: bool = False) -> None:
    lag, updates, log = schedule(number, rescue=rescue)
    expected = [(step, step, step - min(step, lag)) for step in range(updates)]
    assert log == expected, f"schedule {number}"


def test_a_failing_reward_loses_no_response_and_changes_no_lag() -> None:
    for number in range(300):
        check(number, rescue=True)


@pytest.mark.slow
def test_no_schedule_breaks_the_bound_or_loses_a_batch() -> None:
    for number in range(SCHEDULES):
        check(number)


def test_the_two_printed_orders() -> None:
    """Sampler and learner in turn, one and two steps apart: version of each iteration's samples."""
    for lag in (0, 1, 2):
        run = engine(lag, Sampler(random.Random(0), 0.0))
        run.run(7)
        assert [version for _, _, version in run.log] == [max(0, step - lag) for step in range(7)]
        assert run.learner.version == 7
