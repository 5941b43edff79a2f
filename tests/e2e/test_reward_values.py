"""What rewards do in a run: per-token rewards, sums, odd values, batches that train nothing."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from kedge import Algorithm, GRPOConfig, GRPOTrainer, ppo, remax
from kedge.algorithms import AdvantageInputs
from kedge.learner.learner import HFLearner
from kedge.records.errors import RewardError
from kedge.records.types import AdvantageOutput
from tests.e2e.small import PROMPTS, length_reward, rows, small
from tests.e2e.test_groups import grpo, weights
from tests.environments.test_trainers import tooled
from tests.environments.toys import played

Seen = list[tuple[AdvantageInputs, AdvantageOutput]]


def spied(algorithm: Algorithm) -> tuple[Algorithm, Seen]:
    """The algorithm, and the list of what goes into and comes out of its advantages."""
    seen: Seen = []

    def compute(e: AdvantageInputs, kl_coef: float) -> AdvantageOutput:
        seen.append((e, algorithm.compute_advantages(e, kl_coef)))
        return seen[-1][1]

    return replace(algorithm, compute_advantages=compute), seen


def one_per_token(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    return [[1.0] * len(ids) for ids in completion_ids]


class AfterSteps(TrainerCallback):
    """Calls a function after every iteration."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.call()


def ppo_of_groups(**changes: Any) -> Any:
    """A PPO trainer whose options are those of ``grpo``."""
    return small(
        reward_model=None,
        num_generations=4,
        per_device_train_batch_size=8,
        num_ppo_epochs=1,
        **changes,
    )


def run_ppo(algorithm: Algorithm, **changes: Any) -> tuple[Any, Seen]:
    algorithm, seen = spied(algorithm)
    options = {"reward_model": None, "preflight": False, "total_episodes": 8, "num_ppo_epochs": 1}
    options |= {"per_device_train_batch_size": 8, "kl_coef": 0.0}
    trainer = small(algorithm=algorithm, **options | changes)
    trainer.train()
    return trainer, seen


class TestPerTokenRewardsArePartOfTheScore:
    def test_a_replaced_score_replaces_them(self) -> None:
        _, seen = run_ppo(
            ppo(), reward_funcs=one_per_token, non_eos_penalty=True, penalty_reward_value=-1.0
        )
        (inputs, outputs), = seen  # fmt: skip
        totals, ended = outputs.rewards.sum(1), inputs.rollout.terminated
        assert not ended.all()
        assert totals[~ended].tolist() == [-1.0] * int((~ended).sum())  # one per token: 6.0

    def test_the_running_scale_divides_by_their_deviation(self) -> None:
        def by_id(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
            return [[10.0 * token for token in ids] for ids in completion_ids]

        trainer = small(
            reward_model=None, reward_funcs=by_id, scale_rewards="running", preflight=False
        )
        trainer.train()
        deviation = rows(trainer)[0]["objective/scores_std"]
        assert deviation > 100
        mean = rows(trainer)[0]["objective/scores"] / deviation
        assert 0 < rows(trainer)[0]["val/return_mean"] < mean  # of hundreds, if not divided

    def test_remax_subtracts_those_of_the_greedy_response(self) -> None:
        trainer, seen = run_ppo(remax(reference=False), reward_funcs=one_per_token)
        (inputs, outputs), = seen  # fmt: skip
        greedy = inputs.reward_output.greedy_scores
        assert greedy is not None
        assert rows(trainer)[0]["objective/greedy_scores"] == float(greedy.mean())
        assert greedy.min() >= 1
        lengths = inputs.rollout.loss_mask.sum(1)
        assert outputs.advantages[:, 0].tolist() == (lengths - greedy).tolist()

    def test_metrics_evaluation_and_groups_count_them(self) -> None:
        trainer = grpo(
            reward_funcs=one_per_token,
            eval_dataset=PROMPTS[:4],
            eval_strategy="steps",
            eval_steps=1,
            dynamic_sampling=1,
        )
        trainer.train()
        row = rows(trainer)[0]
        assert row["objective/scores"] == row["completions/mean_length"]
        assert row["objective/uniform_groups"] < 1
        assert row["rollout/resampled_groups"] < 2  # of 2 groups in the round
        evaluation = next(r for r in trainer.state.log_history if "eval_objective/scores" in r)
        assert evaluation["eval_objective/scores"] == evaluation["eval_completions/mean_length"]


class InParts:
    """Every other episode gets 0.3 and 0.6 for two turns, the others 0.9 for one."""

    episodes = count()

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.rewards = [0.3, 0.6] if next(self.episodes) % 2 else [0.9]
        return "go", {}

    def step(self, response: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = self.rewards.pop(0)
        return "more", reward, not self.rewards, False, {}


class TestSumsAreRoundedOnce:
    def test_of_functions(self) -> None:
        def first(completions: list[str], **_: Any) -> list[float]:
            return [0.3 if i % 2 else 0.9 for i in range(len(completions))]

        def second(completions: list[str], **_: Any) -> list[float]:
            return [0.6 if i % 2 else 0.0 for i in range(len(completions))]

        trainer = grpo(reward_funcs=[first, second], preflight=False)
        trainer.train()
        assert [row["objective/uniform_groups"] for row in rows(trainer)] == [1.0, 1.0]  # not 0

    @pytest.mark.parametrize("credit", ["token", "turn"])
    def test_of_turns(self, credit: str, tmp_path: Any) -> None:
        trainer = tooled(
            GRPOTrainer, GRPOConfig, environment=InParts, credit=credit, output_dir=str(tmp_path)
        )
        trainer.train()
        (row,) = rows(trainer)
        assert row["environment/turns"] == 1.5
        assert row["objective/uniform_groups"] == 1.0  # not 0
        assert row["val/advantage_std"] == 0.0


class TwoTurns:
    """A reward of 1 for each of two turns."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return "w9", {}

    def step(self, response: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return "w10 w11", 1.0, self.turns == 2, False, {}


def test_after_last_puts_the_reward_of_the_last_turn_one_slot_later() -> None:
    algorithm, seen = spied(ppo(score_position="after_last", gamma=0.5, lam=1.0))
    played(environment=TwoTurns, algorithm=algorithm, kl_coef=0.0).train()
    inputs, outputs = seen[0]
    assert outputs.returns is not None
    for row, mask in zip(outputs.returns, inputs.rollout.loss_mask, strict=True):
        assert float(row[mask][-1]) == pytest.approx(0.5, abs=1e-5)  # 0.5 * 1, not 0.5 * 2 - 1


@pytest.mark.parametrize("make", [grpo, ppo_of_groups], ids=["grpo", "ppo"])
def test_an_iteration_without_trained_tokens_leaves_the_weights(make: Any) -> None:
    calls = count()

    def reward(completions: list[str], **_: Any) -> list[float]:
        varies = next(calls) < 1
        return [float(i % 4) if varies else 1.0 for i in range(len(completions))]

    trainer = make(
        reward_funcs=reward, drop_uniform_groups=True, preflight=False, weight_decay=0.1,
        total_episodes=24, lr_scheduler_type="constant",
    )  # fmt: skip
    before = [weights(trainer)]
    trainer.add_callback(AfterSteps(lambda: before.append(weights(trainer))))
    trainer.train()
    moved = [float((b - a).abs().max()) for a, b in pairwise(before)]
    assert moved[0] > 1e-4
    assert moved[1:] == [0.0, 0.0]  # momentum and weight decay moved them by 1e-3


def test_the_running_scale_counts_a_failed_iteration_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return small(
            reward_model=None, reward_funcs=length_reward, scale_rewards="running",
            num_ppo_epochs=1, save_strategy="steps", save_steps=100, preflight=False,
            output_dir=str(tmp_path), total_episodes=16,
        )  # fmt: skip

    calls, compute = count(1), HFLearner.compute_logprobs

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError("no memory")
        return compute(*args, **options)

    monkeypatch.setattr(HFLearner, "compute_logprobs", fail)
    with pytest.raises(MemoryError):
        make().train()
    resumed = make()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.engine.reward_scale.count == 16  # 4 iterations of 4, not 20


class PaysOnce(TwoTurns):
    """A reward of 1 for one of two turns, the first in every other episode."""

    episodes = count()

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.paid = 1 + next(self.episodes) % 2
        return super().reset(seed=seed, options=options)

    def step(self, response: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(response)
        return (observation, float(self.turns == self.paid), *rest)


class TestUniformGroupsAreThoseThatNothingIsComparedIn:
    @pytest.mark.parametrize(("credit", "untrained"), [("token", 8), ("turn", 0)])
    def test_equal_sums_of_rewards_at_other_turns(
        self, credit: str, untrained: int, tmp_path: Path
    ) -> None:
        trainer = tooled(
            GRPOTrainer, GRPOConfig, environment=PaysOnce, credit=credit, drop_uniform_groups=True,
            output_dir=str(tmp_path), preflight=False,
        )  # fmt: skip
        trainer.train()
        (row,) = rows(trainer)
        assert row["rollout/untrained_rows"] == untrained  # 8 with turns, whose advantages differ
        assert row["objective/uniform_groups"] == untrained / 8

    @pytest.mark.parametrize("make", [grpo, ppo_of_groups], ids=["grpo", "ppo"])
    def test_equal_scores_of_unequal_length_penalty(self, make: Any) -> None:
        trainer = make(
            reward_funcs=lambda completions, **_: [1.0] * len(completions), overlong_buffer=6,
            drop_uniform_groups=True, preflight=False, stop_token_ids=list(range(3, 16)),
            total_episodes=8,
        )  # fmt: skip
        trainer.train()
        (row,) = rows(trainer)
        assert row["completions/min_length"] < row["completions/max_length"]
        assert row["rollout/untrained_rows"] == 0  # GRPO; PPO dropped all 8


class Odd:
    def __str__(self) -> str:
        raise TypeError("no text")

    __repr__ = __str__


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def exits(error: BaseException) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


ODD: dict[str, Callable[[], object]] = {
    "a number that Python does not print": lambda: 10**5000,
    "an object that cannot be printed": Odd,
    "an error that cannot be printed": exits(Mute()),
    "SystemExit": exits(SystemExit(3)),
    "GeneratorExit": exits(GeneratorExit()),
    "CancelledError": exits(CancelledError()),
    "another BaseException": exits(BaseException("group")),
}


class TestWhateverARewardGivesCostsItsRow:
    @pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
    @pytest.mark.parametrize("name", ODD)
    def test_it_is_dropped(self, name: str, asynchronous: bool) -> None:
        def reward(prompts: list[str], **_: Any) -> list[object]:
            return [ODD[name]() if p == PROMPTS[0]["prompt"] else float(len(p)) for p in prompts]

        async def later(prompts: list[str], **_: Any) -> list[object]:
            return reward(prompts)

        trainer = small(
            reward_model=None, reward_funcs=later if asynchronous else reward,
            train_dataset=PROMPTS[:4], on_reward_error="drop", preflight=False, num_ppo_epochs=1,
        )  # fmt: skip
        trainer.train()
        assert [row["rollout/dropped_rows"] for row in rows(trainer)] == [1, 1]

    def test_ctrl_c_is_none_of_its_errors(self) -> None:
        def reward(prompts: list[str], **_: Any) -> list[float]:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            small(reward_model=None, reward_funcs=reward, on_reward_error="drop").train()

    def test_gradients_that_it_turns_off_are_on_in_the_step(self) -> None:
        def reward(completions: list[str], **_: Any) -> list[float]:
            torch.set_grad_enabled(False)
            return length_reward(completions)

        try:
            trainer = small(reward_model=None, reward_funcs=reward, preflight=False)
            trainer.train()
        finally:
            torch.set_grad_enabled(True)
        assert min(row["grad_norm/policy"] for row in rows(trainer)) > 1e-3

    def test_names_of_metrics_are_texts(self) -> None:
        def reward(completions: list[str], log_metric: Any) -> list[float]:
            log_metric(3, 1.0)
            return [0.0] * len(completions)

        with pytest.raises(RewardError, match=r"log_metric\(.*\) needs a text as its name, got 3 "):
            small(reward_model=None, reward_funcs=reward).train()


@pytest.mark.parametrize("make", [grpo, ppo_of_groups], ids=["grpo", "ppo"])
def test_rewards_that_are_all_none_train_nothing_and_end_nothing(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(
        reward_funcs=lambda completions, **_: [None] * len(completions), total_episodes=12 * 8
    )
    before = weights(trainer)
    trainer.train()
    assert [r["rollout/dropped_rows"] for r in trainer.state.log_history[:-1]] == [8.0] * 12
    assert torch.equal(weights(trainer), before)
    assert caplog.text.count("every reward is None") == 1
