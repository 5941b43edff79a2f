"""Environments, tools and rollout functions in the trainers and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kedge import GRPOConfig, GRPOTrainer, PPOConfig, RLOOConfig, RLOOTrainer
from kedge.cli.main import main
from kedge.environments import EnvironmentRollouts
from kedge.errors import ConfigError
from kedge.testing import tiny_policy
from tests.e2e.small import length_reward, rows, small
from tests.e2e.test_groups import make
from tests.environments.families import tokenizer
from tests.environments.test_tools import Counter, calculator
from tests.environments.toys import CHAT, Echo, chat_tokenizer, policy

PROMPTS = [{"prompt": p} for p in CHAT]
TOOL_PROMPTS = [
    {"prompt": [{"role": "user", "content": f"what is {i} + 25?"}], "environment": name}
    for i, name in enumerate(["count", "other"] * 3)
]


def turns_reward(completions: list[Any], **_: Any) -> list[float]:
    """Words of the policy; checks who said what."""
    for messages in completions:
        assert [m["role"] for m in messages] == ["assistant", "user"] * 2 + ["assistant"]
        assert messages[1]["content"].endswith("w5")  # what the environment said
    return [sum(len(m["content"].split()) for m in c[::2]) for c in completions]


def played(**options: Any) -> Any:
    """A PPO trainer on the echo environment."""
    parts: dict[str, Any] = {
        "model": policy(),
        "processing_class": chat_tokenizer(),
        "reward_model": None,
        "train_dataset": PROMPTS,
        "response_length": 40,
        "stop_token": "eos",
        "max_turn_tokens": 5,
        "total_episodes": 8,
    }
    return small(**parts | options)


def tooled(trainer: Any, config: Any, **options: Any) -> Any:
    """A trainer of groups whose policy may call tools; its tokenizer is like Qwen's."""
    trained = {name: options.pop(name) for name in TOOLS if name in options}
    model = tiny_policy("qwen2", vocab_size=448, max_positions=1024)
    parts: dict[str, Any] = {
        "model": model,
        "processing_class": tokenizer("qwen2.5"),
        "train_dataset": TOOL_PROMPTS,
        "reward_funcs": None,
    }
    config = config(
        output_dir=options.pop("output_dir"), per_device_train_batch_size=8, num_generations=4,
        max_steps=1, logging_steps=1, save_strategy="no", num_sample_generations=0, use_cpu=True,
        disable_tqdm=True, stop_token="eos", max_completion_length=60, max_turn_tokens=20,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    return trainer(args=config, **parts | trained)


TOOLS = ("tools", "environment_factory", "environment", "reward_funcs", "train_dataset")


@pytest.mark.parametrize(
    "given",
    [
        {"environment": Echo},
        {"environment": "tests.environments.toys:Echo", "environment_kwargs": '{"turns": 2}'},
        {"environment": lambda: Echo(2), "credit": "turn", "max_lag": 1},
        {"environment": Echo, "train_dataset": None, "reward_funcs": turns_reward},
    ],
    ids=["class", "name", "turn credit", "no dataset"],
)
def test_ppo_plays(given: dict[str, Any]) -> None:
    made = played(**given)
    made.train()
    row = rows(made)[-1]
    two = "environment_kwargs" in given or "credit" in given
    assert row["environment/turns"] == (2 if two else 3)
    assert "reward_funcs" not in given or row["rewards/turns_reward"] == row["environment/words"]
    assert isinstance(made.engine.rollout_engine, EnvironmentRollouts)


@pytest.mark.parametrize("in_flight", [False, True])
def test_episodes_that_are_done_first(in_flight: bool, tmp_path: Path) -> None:
    schedule: dict[str, Any] = {
        "rollout_schedule": "as_completed",
        "max_lag": 2,
        "in_flight_weight_updates": in_flight,
    }
    more = {"sampler_correction": "truncate", "total_episodes": 24, "output_dir": str(tmp_path)}
    trainer = played(environment=Echo, **schedule, **more)
    trainer.train()
    found = rows(trainer)
    assert [row["episode"] for row in found] == [4, 8, 12, 16, 20, 24]
    assert all(row["environment/turns"] > 1 for row in found)
    assert all(row["rollout/lag_max" if in_flight else "rollout/lag"] <= 2 for row in found)


def test_rows_without_a_prompt_are_those_with_an_empty_message() -> None:
    """Rows that only name their environment, or have other columns for ``reset``."""
    bare = [{"environment": "echo", "level": i} for i in range(4)]
    filled = [row | {"prompt": [{"role": "user", "content": ""}]} for row in bare]
    scores = []
    for prompts in (bare, filled):
        trainer = played(environment={"echo": Echo}, train_dataset=prompts, eval_dataset=prompts)
        trainer.train()
        scores.append([row["objective/scores"] for row in rows(trainer)])
        assert "eval_objective/scores" in trainer.evaluate()
    assert scores[0] == scores[1]


def test_evaluation_plays_too() -> None:
    made = played(environment=Echo, eval_dataset=PROMPTS[:4])
    metrics = made.evaluate()
    assert metrics["eval_environment/turns"] == 3
    assert metrics["eval_environment/words"] > 0


@pytest.mark.parametrize(
    ("trainer", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)]
)
def test_groups_take_tools_and_factories(trainer: Any, config: Any, tmp_path: Path) -> None:
    made = tooled(
        trainer,
        config,
        output_dir=str(tmp_path),
        tools=[calculator],
        environment_factory={"count": Counter, "other": Counter},
        max_tool_calling_iterations=2,
        credit="turn",
    )
    made.train()
    row = rows(made)[-1]
    assert row["environment/turns"] == 1  # a random policy calls no tool
    assert "rewards/environment" in row
    prompt = made.engine.rollout_engine.generate(
        made.engine.source.batch(0), sampling=made.engine.sampling, seed=0
    ).prompts
    text = tokenizer("qwen2.5").decode(prompt.ids[0][prompt.mask[0]])
    assert '"calculator"' in text
    assert '"increment"' in text


def test_rollout_func_gets_the_trainer(tmp_path: Path) -> None:
    seen: list[Any] = []

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append(trainer)
        assert trainer.model is not None
        return {
            "prompt_ids": [[3, 4]] * len(prompts),
            "completion_ids": [[5 + i % 3, 6, 0] for i in range(len(prompts))],
            "logprobs": None,
            "won": [float(i % 2) for i in range(len(prompts))],
        }

    def won_game(completions: list[str], won: list[float], **_: Any) -> list[float]:
        return won

    options = make(GRPOTrainer, GRPOConfig, output_dir=str(tmp_path)).args
    made = GRPOTrainer(
        model=policy(), args=options, train_dataset=PROMPTS, reward_funcs=won_game,
        processing_class=chat_tokenizer(), rollout_func=rollout_func,
    )  # fmt: skip
    made.train()
    assert seen[0] is made
    assert rows(made)[-1]["rewards/won_game"] == 0.5


def bare(x):  # type: ignore[no-untyped-def]
    return x


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"environment": Echo, "tools": [calculator]}, "both decide how episodes are sampled"),
        ({"environment": Echo()}, "must be a class or a function that makes an environment"),
        ({"environment": Counter}, "passed as environment_factory="),
        ({"environment": "tests.environments.toys:Nothing"}, "does not define 'Nothing'"),
        ({"environment": "nowhere:Echo"}, "cannot import 'nowhere'"),
        ({"environment": "Echo"}, "must be module:Class or file.py:Class"),
        (
            {"environment": "x.y:Z", "environment_kwargs": "[1]"},
            "must be a mapping of names to values",
        ),
        (
            {"environment_kwargs": '{"turns": 2}', "reward_funcs": length_reward},
            "needs environment",
        ),
        ({"tools": [calculator]}, "no reward is configured"),
        ({"tools": [bare], "reward_funcs": length_reward}, "the tool bare needs type hints"),
        ({"environment_factory": object}, "object must have a method reset"),
        ({"environment": Echo, "stop_token": None, "max_turn_tokens": None}, "turns that end"),
        (
            {"environment": {"a": Echo}, "train_dataset": None},
            "several environments need a train_dataset",
        ),
        (
            {"environment": Echo, "train_dataset": None, "total_episodes": None},
            "set max_steps or total_episodes",
        ),
        (
            {"rollout_func": lambda p, t: {}, "reward_funcs": length_reward, "max_lag": 1},
            "max_lag must be 0, got 1",
        ),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        played(**given)


def test_options_of_the_config() -> None:
    config = PPOConfig(output_dir="x", use_cpu=True)
    assert (config.max_turns, config.on_env_error, config.credit) == (None, "raise", "token")
    with pytest.raises(ConfigError, match="on_env_error"):
        PPOConfig(output_dir="x", use_cpu=True, on_env_error="skip")
    with pytest.raises(ConfigError, match="max_turns"):
        PPOConfig(output_dir="x", use_cpu=True, max_turns=0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "model", tmp_path / "run"
    policy().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    arguments = {
        "model_name_or_path": folder,
        "environment": "tests.environments.toys:Echo",
        "environment_kwargs": '{"turns": 2}',
        "output_dir": out,
        "stop_token": "eos",
        "response_length": 30,
        "max_turn_tokens": 5,
        "per_device_train_batch_size": 4,
        "total_episodes": 8,
        "logging_steps": 1,
        "num_sample_generations": 0,
        "use_cpu": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    assert main(["ppo", *flags]) in (0, None)
    assert '"environment/turns": 2.0' in (out / "metrics.jsonl").read_text()
    assert "dummy reward" not in capsys.readouterr().out
