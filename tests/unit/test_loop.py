"""The loop: order of sampling and learning, receipts, what goes on after a resume."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.algorithms import ppo
from kedge.loop import stages
from kedge.loop.batch_sizes import BatchSizes
from kedge.loop.control import KL, RATIO, AdaptiveKL, StepControl, StepLimits
from kedge.loop.loop import Engine
from kedge.loop.metrics import check_known
from kedge.records.errors import CheckpointError, RewardError, RolloutError, SyncError
from kedge.records.protocols import Hook
from kedge.records.types import (
    Experience,
    PromptBatch,
    Receipt,
    RewardOutput,
    Rollout,
    Sampling,
    StepReport,
)
from kedge.testing import FunctionReward

from .toys import ToyEngine, ToyLearner, ToyPrompts

PLAN = BatchSizes(
    world_size=1, micro_rows=2, local_rows=6, minibatches=2, epochs=2, group=2, iterations=100
)


def count_threes(rollout: Rollout) -> Tensor:
    return ((rollout.ids == 3) & rollout.loss_mask).sum(1).float()


def engine(max_lag: int = 0, **changes: Any) -> Engine:
    learner = ToyLearner()
    parts: dict[str, Any] = {
        "source": ToyPrompts(),
        "rollout_engine": ToyEngine(learner.log),
        "reward": FunctionReward(count_threes),
        "learner": learner,
        "algorithm": ppo(),
        "kl": AdaptiveKL(value=0.05, target=1.0, horizon=100.0),
        "batch_sizes": PLAN,
        "sampling": Sampling(max_new_tokens=4),
        "max_lag": max_lag,
    }
    return Engine(**(parts | changes))


class StopAfterThree(Hook):
    def on_step_end(self, report: StepReport) -> bool:
        return report.step == 3


def test_what_was_sampled_ahead_fits_the_run_that_goes_on(logged: Any) -> None:
    first = engine(2)

    first.hooks = [StopAfterThree()]
    first.run(6)
    flight = first.in_flight
    assert len(flight) == 2

    nearer = engine(1)
    nearer.load_state_dict(first.state_dict())
    with logged("too old for max_lag=1; they are dropped and sampled again"):
        nearer.restore(flight)
    assert nearer.in_flight == []

    smaller = engine(2, source=ToyPrompts(prompts=2))
    smaller.load_state_dict(first.state_dict())
    with pytest.raises(CheckpointError, match="must be batches of 4 responses, got 6"):
        smaller.restore(flight)


def test_a_metric_without_a_description_is_an_error() -> None:
    with pytest.raises(KeyError, match="loss/valeu"):
        check_known({"loss/valeu": 1.0})


@pytest.mark.parametrize("max_lag", [0, 2])
def test_the_gap_of_a_weight_sync_is_logged_with_what_was_sampled_by_it(max_lag: int) -> None:
    class Apart(ToyEngine):
        def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
            receipt = super().load_weights(weights, version)
            assert receipt is not None
            return replace(receipt, gap=1e-3 * (version + 1))

    class Compare(Hook):
        seen = 0

        def on_step_end(self, report: StepReport) -> bool:
            newest = int(report.rollout.policy_version.max())
            assert report.metrics["rollout/sync_gap"] == pytest.approx(1e-3 * (newest + 1))
            Compare.seen += 1
            return False

    engine(rollout_engine=Apart(), hooks=[Compare()], max_lag=max_lag).run(5)
    assert Compare.seen == 5


def test_an_engine_that_keeps_old_weights_is_caught() -> None:
    class Deaf(ToyEngine):
        def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
            if version:
                return Receipt(version=version, fingerprint=repr(self.logits.tolist()))
            return super().load_weights(weights, version)

    with pytest.raises(SyncError, match="sample from another policy"):
        engine(rollout_engine=Deaf()).run(3)


def test_an_update_without_gradient_is_no_lost_sync_when_receipts_come_late() -> None:
    class Pausing(ToyLearner):
        def optimizer_step(self, *given: Any, **options: Any) -> dict[str, float]:
            before = self.weights()
            metrics = super().optimizer_step(*given, **options)
            if self.version != 1:
                return metrics
            with torch.no_grad():
                self.logits.copy_(before["logits"])
            return metrics | {"grad_norm/policy": 0.0}

    class Slow(ToyEngine):
        def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
            time.sleep(0.05)
            return super().load_weights(weights, version)

    run = engine(learner=Pausing(), rollout_engine=Slow(), max_lag=1)
    run.run(5)
    assert run.step == 5


def test_a_sync_that_changed_nothing_is_caught() -> None:
    class Frozen(ToyLearner):
        def fingerprint(self) -> str:
            return "same"

    class Agreeable(ToyEngine):
        def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
            super().load_weights(weights, version)
            return Receipt(version=version, fingerprint="same")

    with pytest.raises(SyncError, match="did not change"):
        engine(learner=Frozen(), rollout_engine=Agreeable()).run(3)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_an_exception_in_the_sampler_reaches_the_caller(max_lag: int) -> None:
    class Broken(ToyEngine):
        def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
            raise RolloutError("out of paper")

    with pytest.raises(RolloutError, match="out of paper"):
        engine(max_lag, rollout_engine=Broken()).run(2)


def test_the_next_batch_is_sampled_while_rewards_are_computed() -> None:
    begun: list[int] = []
    second = threading.Event()

    class Noting(ToyEngine):
        def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
            begun.append(seed)
            if len(begun) == 2:
                second.set()
            return super().generate(prompts, sampling=sampling, seed=seed)

    def waiting(rollout: Rollout) -> Tensor:
        assert second.wait(20), "the second batch was not sampled"
        return count_threes(rollout)

    ahead = engine(1, rollout_engine=Noting(), reward=FunctionReward(waiting))
    ahead.run(4)
    undisturbed = engine(1)
    undisturbed.run(4)
    assert len(begun) == 4
    assert torch.equal(ahead.learner.logits, undisturbed.learner.logits)


def test_threads_that_sample_and_score_have_the_gpu_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's current device belongs to a thread; a new one has the first GPU."""
    current: dict[int, int] = {threading.get_ident(): 3}
    seen: list[tuple[str, int]] = []

    def note(part: str) -> None:
        seen.append((part, current.get(threading.get_ident(), 0)))

    class OnGpu(ToyEngine):
        def generate(self, *args: Any, **options: Any) -> Rollout:
            note("sample")
            return super().generate(*args, **options)

    def reward(rollout: Rollout) -> Tensor:
        note("score")
        return count_threes(rollout)

    for name, function in (
        ("is_initialized", lambda: True),
        ("current_device", lambda: current.get(threading.get_ident(), 0)),
        ("set_device", lambda device: current.update({threading.get_ident(): device})),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    engine(max_lag=1, rollout_engine=OnGpu(), reward=FunctionReward(reward)).run(2)
    assert set(seen) == {("sample", 3), ("score", 3)}


def test_dropped_rows_take_no_part() -> None:
    class HalfJudge:
        def __init__(self, spoil: float) -> None:
            self.spoil = spoil

        def score(self, rollout: Rollout) -> RewardOutput:
            valid = torch.arange(len(rollout)) % 2 == 0
            scores = torch.where(valid, count_threes(rollout), self.spoil)
            return RewardOutput(scores=scores, valid=valid)

    runs = [engine(reward=HalfJudge(spoil)) for spoil in (0.0, 1e6)]
    for e in runs:
        e.run(2)
    assert torch.equal(runs[0].learner.logits, runs[1].learner.logits)


def test_ten_batches_in_a_row_without_any_score_are_an_error() -> None:
    class Once:
        valid = True

        def score(self, rollout: Rollout) -> RewardOutput:
            rows, valid, self.valid = len(rollout), self.valid, False
            return RewardOutput(scores=torch.zeros(rows), valid=torch.full((rows,), valid))

    found = engine(reward=Once())
    with pytest.raises(
        RewardError, match=r"none of the 6 responses .*nor in the 9 batches before it"
    ):
        found.run(11)
    assert found.step == 10


class Learner:
    """Says what it is told of each optimizer step, and notes which it takes."""

    version, rank, world_size, shares_prompts = 0, 0, 1, False

    def __init__(self, found: list[tuple[float, float]]) -> None:
        self.found, self.taken = found, [False] * len(found)
        self.asked = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def optimizer_step(
        self, step: Any, loss: Any, *, only_value: bool, should_apply: Any
    ) -> dict[str, float]:
        ratio, kl = self.found[self.asked]
        metrics = {RATIO: ratio, KL: kl}
        self.taken[self.asked] = should_apply(metrics)
        self.asked += 1
        return metrics


def run(step_limits: StepLimits, found: list[tuple[float, float]]) -> Learner:
    learner = Learner(found)
    flat, mask = torch.zeros(4, 2), torch.ones(4, 2, dtype=torch.bool)
    ids = torch.zeros(4, 2, dtype=torch.long)
    rows = Experience(
        **dict.fromkeys(("prompt_ids", "ids"), ids),
        **dict.fromkeys(("prompt_mask", "loss_mask", "response_mask", "value_mask"), mask),
        **dict.fromkeys(("old_logprobs", "rewards", "advantages"), flat),
    )
    plan = stages.EpochPlan(epochs=2, minibatches=2, micro_rows=2, seed=0)
    stages.optimize(rows, learner, ppo(), plan, StepControl(limits=step_limits))
    return learner


FOUND = [(1.0, 0.0), (11.0, 0.1), (1.1, 2.0), (1.2, 0.0)]


@pytest.mark.parametrize(
    ("step_limits", "taken", "asked"),
    [
        (StepLimits(), [True, True, True, True], 4),
        (StepLimits(max_ratio=10.0), [True, False, True, True], 4),
        (StepLimits(max_kl=1.5), [True, True, False, False], 3),
        (StepLimits(max_kl=1.5, keep_last=True), [True, True, True, False], 3),
        (StepLimits(max_kl=1.5, max_ratio=10.0), [True, False, False, False], 3),
    ],
    ids=str,
)
def test_which_steps_are_taken(step_limits: StepLimits, taken: list[bool], asked: int) -> None:
    learner = run(step_limits, FOUND)
    assert (learner.taken, learner.asked) == (taken, asked)
