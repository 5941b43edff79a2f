"""Optimizer steps that are left out, and passes that end early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kedge.algorithms import ppo
from kedge.loop import stages
from kedge.loop.control import KL, RATIO, StepLimits
from kedge.types import Experience


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
    stages.optimize(
        rows, learner, ppo(), epochs=2, minibatches=2, micro_rows=2, seed=0, step_limits=step_limits
    )
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
