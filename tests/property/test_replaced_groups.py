"""Dynamic sampling group by group: nothing is too old, lost, or used twice."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge.algorithms.base import uniform_rows
from kedge.records.types import RewardOutput, Rollout, Sample, group_rows
from kedge.rollout.scheduler.collector import spare_step

from .test_as_completed import Writing, threads

ROUNDS = 2


class Scores:
    """Scores the first row of a group by its prompt; the second equally, or one more."""

    def __init__(self, number: int) -> None:
        self.rng = random.Random(number)

    def score(self, rollout: Rollout) -> RewardOutput:
        prompt = rollout.prompts.ids[:, 0]
        scores = ((prompt - prompt % 2) % 997).float()
        for rows in group_rows(rollout.prompts)[1]:
            scores[rows[1:]] = scores[rows[0]] + self.rng.choice([0.0, 1.0])
        return RewardOutput(scores=scores, valid=torch.ones(len(scores), dtype=torch.bool))


class Checking(Writing):
    """Looks at the scores, too."""

    def train_on(self, sample: Sample, **begin: Any) -> Any:
        rollout, reward_output = sample.rollout, sample.reward_output
        uniform = reward_output.scores[::2] == reward_output.scores[1::2]
        last = [number_of(int(x))[1] == ROUNDS for x in rollout.prompts.ids[::2, 0]]
        assert all(ended for equal, ended in zip(uniform.tolist(), last, strict=True) if equal)
        assert sample.times["rollout/resampled_groups"] >= 0
        return super().train_on(sample, **begin)


def number_of(prompt: int) -> tuple[int, int]:
    """The place of a prompt in the run, and how often the one before was replaced."""
    step, row = divmod(prompt, 100)
    spare = step - spare_step(0, 0, ROUNDS)
    if spare < 0:
        return prompt, 0
    return spare // ROUNDS * 100 + row, spare % ROUNDS + 1


@pytest.mark.parametrize("in_flight", [False, True])
def test_groups_are_replaced_within_the_bound(in_flight: bool) -> None:
    algorithm = SimpleNamespace(
        needs_greedy=False,
        resample=ROUNDS,
        min_group=1,
        name="group by group",
        uniform=uniform_rows,
    )
    replaced = 0
    for number in range(12):
        parts = {"kind": Checking, "algorithm": algorithm, "reward": Scores(number)}
        ranks = 1 + number % 2
        log, updates = threads(number, in_flight=in_flight, ranks=ranks, **parts)
        places = [number_of(prompt) for _, prompt, _ in log]
        assert sorted(place for place, _ in places) == [
            step * 100 + row for step in range(updates) for row in range(12)
        ]
        replaced += sum(turn > 0 for _, turn in places)
    assert replaced > 0
