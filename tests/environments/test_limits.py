"""What limits do to episodes and why these end, in the numbers of a trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge import GRPOConfig, GRPOTrainer
from kedge.config.algorithms import RECIPES
from kedge.environments import Response
from kedge.environments.episode import ENDINGS
from kedge.records.errors import CheckpointError, ConfigError, RolloutError
from kedge.records.protocols import EnvironmentInfo
from kedge.testing import tiny_policy, tiny_reward_model
from tests.e2e.small import QUIET, rows
from tests.environments.test_tools import calculator
from tests.environments.toys import (
    CHAT,
    PROMPTS,
    VOCAB,
    Echo,
    chat_tokenizer,
    engine,
    played,
    policy,
    prompts,
    rollouts,
    sampling,
)
from tests.unit.text_toys import EOS


def ppo(environment: Any, positions: int = 256, *, family: Any = "llama", **options: Any) -> Any:
    """A PPO trainer of tiny models on an environment."""
    parts: dict[str, Any] = {
        "model": tiny_policy(family, vocab_size=VOCAB, max_positions=positions),
        "environment": environment,
        "max_turn_tokens": None,
        "num_ppo_epochs": 1,
        "total_episodes": 4,
    }
    return played(**parts | options)


def grpo(folder: Any, *, prompts: Any = PROMPTS[:1], **given: Any) -> dict[str, float]:
    """Metrics of one iteration of GRPO: 8 responses to two prompts."""
    trainer = {k: given.pop(k) for k in ("tools", "environment", "reward_funcs") if k in given}
    options: dict[str, Any] = {
        **QUIET,
        **{"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1},
        "learning_rate": 1e-3,
    }
    made = GRPOTrainer(
        model=policy(eos_token_id=EOS),
        processing_class=chat_tokenizer(),
        train_dataset=prompts,
        args=GRPOConfig(output_dir=str(folder), **options | given),
        **trainer,
    )
    made.train()
    return rows(made)[-1]


class Once:
    """One turn; fails if its first token is odd, if asked to."""

    def __init__(self, says: str | None = None, *, turns: int = 1, fails: bool = False) -> None:
        self.says, self.turns, self.fails = says, turns, fails

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        self.turn, self.row = 0, options.get("long", 1)
        return None, {"right": 7}

    def step(self, response: Response) -> Any:
        self.turn += 1
        if self.fails and response.ids[0] % 2:
            raise ValueError("not an action")
        said = None if self.says is None else " ".join([self.says] * self.row)
        return said, 1.0, self.turn >= self.turns, False, {"right": 2 * self.turn, "name": "x"}


def alternate(completions: list[Any], **_: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def test_a_final_answer_that_is_cut_off_is_truncated(tmp_path: Any) -> None:
    found = [
        grpo(
            tmp_path / str(len(tools)), reward_funcs=[alternate], response_length=6,
            mask_truncated_completions=True, missing_eos_penalty=5.0,
            **({"tools": tools} if tools else {}),
        )
        for tools in ([], [calculator])
    ]  # fmt: skip
    for row in found:
        assert 0 < row["completions/truncated_ratio"] == row["rollout/untrained_rows"] / 8 < 1
        assert row["objective/scores"] == 0.5 - 5.0 * row["completions/truncated_ratio"]
    assert found[0]["objective/scores"] == found[1]["objective/scores"]
    ended = [found[1][f"environment/ended_{e}"] for e in ("answer", "token_limit")]
    assert ended == [1 - found[1]["completions/truncated_ratio"], 1 - ended[0]]


def test_a_scored_failure_is_not_truncated(tmp_path: Any) -> None:
    row = grpo(
        tmp_path, environment=lambda: Once(fails=True), response_length=20,
        max_turn_tokens=3, on_env_error="score", env_error_score=-1.0,
        mask_truncated_completions=True, missing_eos_penalty=5.0,
    )  # fmt: skip
    failed = row["environment/errors"]
    assert 0 < failed < 1
    assert row["objective/scores"] == pytest.approx(1 - 2 * failed)
    assert row["rollout/untrained_rows"] == row["completions/truncated_ratio"] == 0


@pytest.mark.parametrize(("family", "schedule"), [("llama", "in_order"), ("gpt2", "as_completed")])
def test_an_episode_that_outgrows_the_context_is_truncated(family: str, schedule: str) -> None:
    """A long episode beside one with room; and a first observation that leaves less room."""
    prompts = [{"prompt": CHAT[0], "long": long} for long in (24, 1)]
    more = {} if schedule == "in_order" else {"rollout_schedule": schedule, "max_lag": 1}
    made = ppo(
        lambda: Once("w9", turns=8), 69, family=family, train_dataset=prompts, response_length=60,
        total_episodes=8, max_turn_tokens=8, **more,
    )  # fmt: skip
    made.train()
    assert len(rows(made)) == 2
    assert rows(made)[-1]["completions/truncated_ratio"] > 0
    assert rows(made)[-1]["rollout/tokens"] <= 4 * 69
    long = ppo(lambda: Opens("w9 " * 30), 69, family=family, response_length=60, **more)
    long.train()
    assert rows(long)[-1]["rollout/tokens"] <= 4 * 69


class Opens(Once):
    """A long first observation."""

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        assert self.says is not None
        return self.says, {}


@pytest.mark.parametrize("schedule", ["in_order", "as_completed"])
def test_observations_without_room_are_cut(schedule: str, tmp_path: Any) -> None:
    more = {} if schedule == "in_order" else {"rollout_schedule": schedule, "max_lag": 1}
    first = ppo(lambda: Opens("w9 " * 2800), max_turn_tokens=8, **more)
    first.train()
    (row,) = rows(first)
    assert row["environment/cut_observations"] == 1
    assert row["rollout/tokens"] <= 4 * 256
    later = ppo(
        lambda: Once("w9 " * 50_000, turns=2), max_turn_tokens=8, response_length=100, **more
    )
    later.train()
    (row,) = rows(later)
    assert row["environment/turns"] == 2
    assert row["environment/cut_observations"] == 1
    assert row["completions/truncated_ratio"] == 0
    rollout = later.engine.rollout_engine.generate(
        later.engine.source.batch(0), sampling=later.engine.sampling, seed=0
    )
    ((message,),) = rollout.episodes.columns["observations"][0][:1]
    assert message["content"].count("...(truncated)...") == 1
    assert 80 <= int(rollout.response_mask[0].sum()) <= 100
    limits = {"max_turn_tokens": 8, "max_observation_tokens": 20, "response_length": 120}
    limited = ppo(lambda: Once("w9 " * 90, turns=4), **limits, **more)
    limited.train()  # without the limit the first answer takes all but one turn's tokens
    (row,) = rows(limited)
    assert row["environment/turns"] == 4
    assert row["environment/cut_observations"] == 3
    assert row["rollout/tokens"] <= 4 * (4 * 8 + 3 * 20)


@pytest.mark.parametrize("credit", ["turn", "token"])
def test_truncated_episodes_bootstrap_from_the_start_of_the_next_turn(credit: str) -> None:
    """V after two of three turns is the V where the third begins, which is trained."""
    values = []
    for turns in (2, 3):
        made = ppo(
            lambda: Once("w10 w11", turns=9), max_turns=turns, max_turn_tokens=3, credit=credit,
            bootstrap_truncated=True,
            value_model=tiny_reward_model("llama", vocab_size=VOCAB, max_positions=256),
        )  # fmt: skip
        engine = made.engine
        rollout = engine.rollout_engine.generate(
            engine.source.batch(0), sampling=engine.sampling, seed=0
        )
        outputs = engine.learner.compute_logprobs(
            rollout, values=True, reference=False, full_kl=False
        )
        assert not rollout.terminated.any()
        if turns == 2:
            values.append(outputs.last_values)
        else:
            third = (rollout.episodes.turn == 2).int().argmax(1)
            values.append(outputs.values.gather(1, third[:, None])[:, 0])
    assert values[0].std() > 0
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-5)


class Dies(Once):
    """Answers five calls of each test, then fails or hangs."""

    answers, hangs, release = iter(()), False, threading.Event()

    def step(self, response: Response) -> Any:
        if next(self.answers, None) is None:
            if not self.hangs:
                raise ValueError("gone")
            self.release.wait(60)
        return super().step(response)


class Hangs(Dies):
    hangs = True


def test_an_environment_that_always_fails_ends_the_run() -> None:
    Dies.answers = iter(range(5))
    made = ppo(Dies, on_env_error="drop", total_episodes=80)
    with pytest.raises(
        RolloutError, match=r"15 of the latest 16 episodes failed.*ValueError: gone"
    ):
        made.train()
    assert made.engine.step == 5


def test_threads_of_steps_that_hang_are_bounded_and_counted() -> None:
    before, Hangs.answers = threading.active_count(), iter(range(5))
    made = ppo(
        Hangs, on_env_error="drop", total_episodes=80, environment_timeout=0.5,
        environment_concurrency=9, preflight=False,
    )  # fmt: skip
    with pytest.raises(
        RolloutError, match=r"9 calls of environments hang, each for longer than 0.5"
    ):
        made.train()
    assert threading.active_count() <= before + 11
    assert [row["environment/hung_calls"] for row in rows(made)] == [0, 3]
    Dies.release.set()


def test_a_wrong_config_of_an_environment_is_said_as_it_is() -> None:
    def wrong() -> Any:
        raise ConfigError("parse_action must say which action of Box(3) a response means")

    for on_error in ("raise", "drop"):
        with pytest.raises(ConfigError, match=r"^parse_action must say which action"):
            ppo(wrong, on_env_error=on_error).train()


@pytest.mark.parametrize(
    ("options", "weights"),
    [({}, 21_696), ({"train_layers": 1}, 33), ({"value_source": "policy"}, 33)],
)
def test_the_critic_of_episodes_is_a_separate_model(options: dict[str, Any], weights: int) -> None:
    made = ppo(lambda: Once("w9"), **options)  # a policy of 22,688 weights, 32 wide
    assert sum(p.numel() for p in made.value_model.parameters()) == weights


def test_a_large_model_is_told_of_the_recipe_which_a_run_then_has(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.trainers.advice.LARGE", 1)
    ppo(lambda: Once("w9"))
    told = [r.getMessage() for r in caplog.records if "recipe('agent')" in r.getMessage()]
    assert len(told) == 1
    caplog.clear()
    made = ppo(
        lambda: Once("w9"), **{**RECIPES["agent"], "total_episodes": 8, "learning_rate": 1e-3}
    )
    assert "recipe('agent')" not in caplog.text
    made.train()
    assert made.engine.learner.optimizer.state_dict()["state"][0]["step"] == 2 * 4
    assert [row["lr"] for row in rows(made)] == [1e-3, 1e-3]
    assert [row["objective/kl_coef"] for row in rows(made)] == [0.0, 0.0]


def test_a_checkpoint_with_a_head_as_the_value_names_the_way_out(tmp_path: Path) -> None:
    kept = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    kept |= {"total_episodes": 8}
    head = {"value_source": "policy", **kept}
    ppo(lambda: Once("w9"), **head).train()
    with pytest.raises(CheckpointError, match=r'21; resume with value_source="policy"$'):
        ppo(lambda: Once("w9"), **kept).train(resume_from_checkpoint=True)
    made = ppo(lambda: Once("w9"), **head)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert made.state.global_step == 2


@pytest.mark.parametrize("schedule", ["in_order", "as_completed"])
def test_seconds_of_environments_are_per_episode(schedule: str) -> None:
    class Slow(Once):
        def step(self, response: Response) -> Any:
            time.sleep(0.1)
            return super().step(response)

    made = ppo(
        lambda: Slow("w9", turns=3), max_turn_tokens=3, max_lag=1, rollout_schedule=schedule,
        total_episodes=12,
    )  # fmt: skip
    made.train()
    names = ("environment/seconds", "environment/model_seconds", "time/rollout")
    waiting, model, sampling = (sum(row[name] for row in rows(made)) for name in names)
    # Rows were counted 4 times once; the rest of sampling is not in either.
    assert 4 * (waiting + model) == pytest.approx(sampling, rel=0.5)
    assert 4 * waiting > 0.3


def test_numbers_in_info_are_metrics() -> None:
    class Says(Once):
        def step(self, response: Response) -> Any:
            *answer, info = super().step(response)
            own = {"turns": 7.0, "seconds": -1.0, "success": 0.5}
            return *answer, info | {"metrics": own, "errors": 9}

    made = ppo(lambda: Says("w9", turns=3), max_turn_tokens=3)
    made.train()
    row = rows(made)[-1]
    assert row["environment/right"] == 6  # the last of 7, 2, 4, 6
    assert row["environment/success"] == 1.5
    assert (row["environment/turns"], row["environment/errors"]) == (3, 0)  # not the environment's
    assert row["environment/seconds"] >= 0


def test_lengths_and_texts_are_those_of_the_policy(tmp_path: Any) -> None:
    """An environment that says much more to some responses than to others."""

    class Loud(Once):
        spoken = iter([28, 1] * 100)

        def step(self, response: Response) -> Any:
            self.row = next(self.spoken)
            return (*super().step(response)[:1], 1.0, self.turn >= self.turns, False, {})

    seen: list[Any] = []

    def says(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(zip(completions, completion_ids, strict=True))
        return [0.0] * len(completions)

    for chat in (True, False):
        row = grpo(
            tmp_path / str(chat), environment=lambda: Loud(" w23", turns=2), reward_funcs=[says],
            prompts=PROMPTS[:1] if chat else [{"prompt": "w7 w8"}], response_length=40,
            max_turn_tokens=2, overlong_buffer=20, stop_token="eos",
        )  # fmt: skip
        assert row["completions/max_length"] == 4
        assert row["grad_norm"] == 0  # the penalty of all is 0, so the group has equal scores
        assert all(len(ids) <= 4 for _, ids in seen)
    assert sum("w23" in text for text, _ in seen[8:]) == 0
    assert all(text.count("\n") == 1 for text, _ in seen[8:])


class Broken(Echo):
    """Fails in its second turn."""

    def step(self, response: Any) -> Any:
        if self.turn:
            raise RuntimeError("broken")
        return super().step(response)


class BadGrader(Echo):
    """Cannot say how good an episode was that a limit has ended."""

    info = EnvironmentInfo(final_reward=True)

    def final_reward(self) -> float:
        raise ValueError("no verdict")


def test_a_final_reward_must_be_declared() -> None:
    class Undeclared(Echo):
        final_reward = BadGrader.final_reward

    with pytest.raises(ConfigError, match=r"Undeclared.info = .*EnvironmentInfo\(final_reward="):
        rollouts(Undeclared).generate(prompts(), sampling=sampling(), seed=0)


class CutOff(Echo):
    """Cuts the episode off itself."""

    def step(self, response: Any) -> Any:
        observation, reward, _, _, info = super().step(response)
        return observation, reward, False, self.turn == 2, info


@pytest.mark.parametrize(
    ("make", "options", "ending"),
    [
        (Echo, {}, "done"),
        (CutOff, {}, "truncated"),
        (Echo, {"max_turns": 1}, "turn_limit"),
        (lambda: Echo(turns=99), {"max_turn_tokens": 9}, "token_limit"),
        (Echo, {"max_episode_seconds": 1e-9}, "time_limit"),
        (Broken, {"on_env_error": "score"}, "environment_error"),
        (BadGrader, {"max_turns": 1, "on_env_error": "score"}, "grader_error"),
    ],
)
def test_the_share_of_each_ending(make: Any, options: dict[str, Any], ending: str) -> None:
    trainer = ppo(make, max_turn_tokens=options.pop("max_turn_tokens", 4), **options)
    trainer.train()
    row = rows(trainer)[0]
    assert {e: row[f"environment/ended_{e}"] for e in ENDINGS} == {
        e: float(e == ending) for e in ENDINGS
    }


def test_without_a_trainer_the_positions_of_the_policy_end_an_episode() -> None:
    """As in ``kedge generate --environment``, which gives no context."""
    model = tiny_policy("llama", vocab_size=VOCAB, max_positions=48)
    play = rollouts(lambda: Echo(99), engine(model), max_turn_tokens=5)
    episodes = play.generate(prompts(2), sampling=sampling(max_new_tokens=60), seed=0)
    lengths = episodes.prompts.mask.sum(1) + episodes.response_mask.sum(1)
    assert int(lengths.max()) <= 48
    assert episodes.episodes is not None
    assert episodes.episodes.metrics["environment/ended_token_limit"][0] == 2
