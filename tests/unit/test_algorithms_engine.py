"""What the engine does for algorithms: greedy baselines, rows left out of the loss, metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kedge.algorithms import BUILTIN, grpo
from kedge.algorithms.base import AdvantageInputs
from kedge.loop.stages import micro_batches, rows_within
from kedge.math.masked import one_rank
from kedge.records.types import (
    AdvantageOutput,
    PromptBatch,
    RewardOutput,
    Rollout,
    Sampling,
)
from kedge.rollout.scheduler.collector import collect
from tests.learners import with_metrics
from tests.unit.advantage_inputs import prefix, rollout
from tests.unit.toys import ToyLearner

SAMPLING = Sampling(max_new_tokens=4, temperature=0.7, top_p=0.9)


def prompts(group: list[int]) -> PromptBatch:
    rows = len(group)
    return PromptBatch(
        ids=torch.tensor(group)[:, None],
        mask=torch.ones(rows, 1, dtype=torch.bool),
        group=torch.tensor(group),
        row=torch.arange(rows),
        columns={"name": [f"prompt {g}" for g in group]},
    )


class Answers:
    """Answers ten times the prompt's id, plus one when sampling; remembers what it was asked."""

    shares_weights = True
    logprob_kind = "none"

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[object], Sampling]] = []

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        self.asked.append((prompts.group.tolist(), list(prompts.columns["name"]), sampling))
        mask = torch.ones(len(prompts), 1, dtype=torch.bool)
        ids = 10 * prompts.ids + (sampling.temperature > 0)
        return rollout(mask, prompts=prompts, ids=ids)


class Judge:
    """The score is the token; tokens in ``fails`` cannot be scored."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.fails = fails

    def score(self, rollout: Rollout) -> RewardOutput:
        first = rollout.ids[:, 0]
        bad = torch.tensor([int(i) in self.fails for i in first])
        return RewardOutput(scores=first.float(), valid=~bad)


def gather(group: list[int], judge: Judge) -> tuple[RewardOutput, Answers]:
    engine = Answers()
    sample = collect(
        prompts(group), engine, judge, sampling=SAMPLING, seed=0, clock=lambda: 0.0, greedy=True
    )
    return sample.reward_output, engine


def test_one_greedy_response_per_prompt_is_the_baseline_of_its_group() -> None:
    reward_output, engine = gather([5, 2, 5, 2, 9], Judge())
    assert reward_output.scores.tolist() == [51, 21, 51, 21, 91]
    assert reward_output.greedy_scores is not None
    assert reward_output.greedy_scores.tolist() == [50, 20, 50, 20, 90]
    (_, (group, names, sampling)) = engine.asked
    assert sorted(group) == [2, 5, 9]
    assert names == [f"prompt {g}" for g in group]
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.0, 1.0, 4)


def test_rows_without_baseline_take_no_part() -> None:
    reward_output, _ = gather([5, 2, 5], Judge(fails=(50, 21)))
    assert reward_output.valid.tolist() == [False, False, False]
    reward_output, _ = gather([5, 2, 5], Judge(fails=(50,)))
    assert reward_output.valid.tolist() == [False, True, False]


def batch() -> tuple[Rollout, RewardOutput]:
    group = [0, 0, 1, 1, 2, 2]
    mask = prefix([3, 1, 2, 2, 3, 3])
    terminated = torch.tensor([True, False, True, True, True, True])
    responses = rollout(mask, prompts=prompts(group), terminated=terminated)
    scores = torch.tensor([1.0, 2.0, 3.0, 3.0, 4.0, 9.0])
    valid = torch.tensor([True, True, True, True, True, False])
    return responses, RewardOutput(scores=scores, valid=valid)


def test_rows_left_out_by_credit_have_no_weight() -> None:
    responses, reward_output = batch()
    rule = grpo(mask_truncated_completions=True, drop_uniform_groups=True)
    experience, metrics = with_metrics(responses, reward_output, ToyLearner(), rule, 0.0)
    # Truncated; equal scores; alone in its group, where no two scores differ; not valid.
    assert experience.loss_mask.any(1).tolist() == [True, False, False, False, False, False]
    assert experience.value_mask is experience.loss_mask
    assert metrics["rollout/untrained_rows"] == 4
    assert metrics["objective/uniform_groups"] == pytest.approx(2 / 4)
    (whole,) = micro_batches(experience, torch.arange(6), rule, 6, one_rank)
    assert whole.token_weight.sum().item() == pytest.approx(1)
    assert whole.row_weight.tolist().count(1.0) == 1
    # Without groups there are no metrics about them.
    responses = replace(responses, prompts=replace(responses.prompts, group=torch.arange(6)))
    algorithm = BUILTIN["reinforce_pp"]()
    _, metrics = with_metrics(responses, reward_output, ToyLearner(), algorithm, 0.0)
    assert "objective/uniform_groups" not in metrics
    assert "rollout/untrained_rows" not in metrics


def test_micro_batches_hold_at_most_the_budget_of_tokens() -> None:
    lengths = [40, 9, 9, 6, 5, 2, 1]
    assert rows_within(lengths, 18, one_rank) == [1, 2, 3, 1]  # 40 alone, 2 x 9, 3 x 6, 1 x 1
    assert rows_within(lengths, 1000, one_rank) == [7]
    assert rows_within(lengths, 1, one_rank) == [1] * 7
    assert rows_within([], 18, one_rank) == []


def test_ranks_have_equally_many_micro_batches() -> None:
    ranks = [[9, 9, 9, 9, 9, 9], [3, 3, 2, 1, 1, 1], [50, 8, 1, 1, 1, 1]]
    alone = [len(rows_within(lengths, 18, one_rank)) for lengths in ranks]
    assert alone == [3, 1, 3]

    def over_ranks(x: Tensor) -> Tensor:
        counts = torch.zeros_like(x)
        for number in alone:
            counts[number] += 1
        return counts

    cuts = [rows_within(lengths, 18, over_ranks) for lengths in ranks]
    assert [len(sizes) for sizes in cuts] == [3, 3, 3]
    assert [sum(sizes) for sizes in cuts] == [6, 6, 6]
    assert cuts[1] == [2, 1, 3]


def test_a_mask_of_credit_never_adds_rows() -> None:
    def compute_advantages(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        everything = torch.ones_like(e.rollout.loss_mask)
        return AdvantageOutput(
            rewards=e.rollout.loss_mask * 1.0,
            advantages=e.rollout.loss_mask * 1.0,
            loss_mask=everything,
        )

    responses, reward_output = batch()
    rule = replace(BUILTIN["rloo"](), compute_advantages=compute_advantages)
    found, _ = with_metrics(responses, reward_output, ToyLearner(), rule, 0.0)
    assert torch.equal(found.loss_mask, responses.loss_mask & reward_output.valid[:, None])
