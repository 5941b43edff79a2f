"""Groups whose scores do not differ are sampled anew; everything else stays as it was."""

from __future__ import annotations

import pytest
import torch

from kedge.rollout.scheduler.collector import resample_uniform_groups, spare_step
from kedge.testing import tiny_policy
from kedge.types import PromptBatch, RewardOutput, Sample
from tests.e2e.small import rows
from tests.e2e.test_groups import grpo
from tests.unit.advantage_inputs import rollout


def batch(names: list[str], width: int) -> PromptBatch:
    """Two responses to each named prompt; prompt tokens count the letters of the name."""
    named = [name for name in names for _ in range(2)]
    return PromptBatch(
        ids=torch.tensor([[0] * (width - 1) + [len(name)] for name in named]),
        mask=torch.tensor([[False] * (width - 1) + [True]] * len(named)),
        group=torch.arange(len(names)).repeat_interleave(2) + 10,
        row=torch.arange(len(named)),
        columns={"name": named},
    )


def answer(prompts: PromptBatch, scores: list[float], width: int) -> Sample:
    count = len(prompts)
    mask = torch.ones(count, width, dtype=torch.bool)
    responses = rollout(
        mask,
        prompts=prompts,
        ids=torch.full((count, width), width),
        policy_version=torch.full((count,), width),
        behavior_logprobs=-mask.float(),
        allowed_tokens=torch.full((count, width, width), 7),
    )
    found = torch.tensor(scores)
    judged = RewardOutput(
        scores=found, valid=torch.ones(count, dtype=torch.bool), components={"part": found * 2}
    )
    return Sample(rollout=responses, reward_output=judged)


def test_by_hand() -> None:
    first = answer(batch(["a", "bb", "ccc"], 1), [0.0, 1.0, 1.0, 1.0, 0.0, 0.0], 2)
    asked: list[tuple[int, list[int], list[object]]] = []

    def draw(prompts: PromptBatch, turn: int) -> Sample:
        asked.append((turn, prompts.row.tolist(), list(prompts.columns["name"])))
        scores = [0.0, 1.0, 1.0, 1.0] if turn == 0 else [1.0, 0.0]
        return answer(prompts, scores, 3 if turn == 0 else 1)

    sample = resample_uniform_groups(
        first,
        prompts=lambda turn: batch([f"{turn}{'x' * i}" for i in range(3)], 2),
        draw=draw,
        rounds=5,
    )
    # Groups bb and ccc are replaced in the first round, what stands in for ccc in the second.
    assert asked == [(0, [2, 3, 4, 5], ["0x", "0x", "0xx", "0xx"]), (1, [4, 5], ["1xx", "1xx"])]
    responses, judged = sample.rollout, sample.reward_output
    assert sample.times == {"rollout/resampled_groups": 3}
    assert responses.prompts.columns["name"] == ["a", "a", "0x", "0x", "1xx", "1xx"]
    assert responses.prompts.ids.tolist() == [[0, 1], [0, 1], [0, 2], [0, 2], [0, 3], [0, 3]]
    assert responses.prompts.group.tolist() == [10, 10, 11, 11, 12, 12]
    assert responses.ids.tolist() == [[2, 2, 0]] * 2 + [[3, 3, 3]] * 2 + [[1, 0, 0]] * 2
    assert responses.loss_mask.sum(1).tolist() == [2, 2, 3, 3, 1, 1]
    assert responses.allowed_tokens is not None
    assert responses.allowed_tokens[0, 0].tolist() == [7, 7, -1]
    assert judged.scores.tolist() == [0, 1, 0, 1, 1, 0]
    assert judged.components["part"].tolist() == [0, 2, 0, 2, 2, 0]


def test_it_gives_up_after_its_rounds_and_asks_for_nothing_without_need() -> None:
    same = answer(batch(["a"], 1), [1.0, 1.0], 1)
    turns: list[int] = []

    def draw(prompts: PromptBatch, turn: int) -> Sample:
        turns.append(turn)
        return answer(prompts, [0.0, 0.0], 1)

    def replaced(sample: Sample) -> float:
        others = resample_uniform_groups(
            sample, prompts=lambda turn: batch(["b"], 1), draw=draw, rounds=2
        )
        return others.times["rollout/resampled_groups"]

    named = [spare_step(step, turn, 3) for step in range(100) for turn in range(3)]
    assert len(set(named)) == 300  # spare prompts are those of no step and of no other round
    assert min(named) > 10**12
    assert (replaced(same), turns) == (2, [0, 1])
    assert (replaced(answer(batch(["a"], 1), [1.0, 0.0], 1)), turns) == (0, [0, 1])


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_trains_on_groups_that_differ(tmp_path, lag) -> None:
    def rare(completions, **columns):
        return [float("w3" in text.split()) for text in completions]

    def train(rounds: int, folder: str) -> list[dict[str, float]]:
        torch.manual_seed(0)
        trainer = grpo(
            output_dir=str(tmp_path / folder),
            model=tiny_policy(vocab_size=32),
            reward_funcs=rare,
            train_dataset=[{"prompt": f"w{i} w{i + 1}"} for i in range(3, 25)],
            per_device_train_batch_size=16,
            max_completion_length=4,
            total_episodes=None,
            max_steps=4,
            learning_rate=1e-3,
            dynamic_sampling=rounds,
            max_lag=lag,
        )
        trainer.train()
        return rows(trainer)

    plain, refilled = train(0, "plain"), train(8, "refilled")
    assert sum(row["objective/uniform_groups"] for row in plain) > 0.5
    assert sum(row["objective/uniform_groups"] for row in refilled) < 0.3
    assert sum(row["rollout/resampled_groups"] for row in refilled) > 0
    again = train(8, "again")
    keys = ("objective/scores", "loss/policy_avg", "rollout/resampled_groups")
    assert [[r[k] for k in keys] for r in again] == [[r[k] for k in keys] for r in refilled]
