"""Environments, tools and rollout functions in the trainers and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from transformers import TrainerCallback

from kedge import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, reinforce_pp, rloo
from kedge.algorithms.transforms import without_reference
from kedge.cli.main import main
from kedge.environments import EnvironmentRollouts
from kedge.environments.success import measure_success
from kedge.loop import updater
from kedge.math.intervals import share_interval
from kedge.records.errors import ConfigError, RewardError
from kedge.testing import tiny_policy
from tests.e2e.small import QUIET, length_reward, rows
from tests.e2e.test_groups import make
from tests.environments.families import tokenizer
from tests.environments.test_tools import Counter, calculator
from tests.environments.toys import PROMPTS, Echo, Odd, chat_tokenizer, played, policy

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
        max_steps=options.pop("steps", 1), stop_token="eos", response_length=60,
        max_turn_tokens=20, **QUIET | {"num_ppo_epochs": 1, "temperature": 1.0} | options,
    )  # fmt: skip
    return trainer(args=config, **parts | trained)


TOOLS = ("tools", "environment_factory", "environment", "reward_funcs", "train_dataset")


@pytest.mark.smoke
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
    assert row.get("rollout/logprob_gap", 0.0) < 1e-5
    assert row["environment/words"] > 0
    assert 0 < row["environment/loss_tokens"] < 1


def test_a_resumed_run_must_play_the_same_episodes(tmp_path: Path, logged: Any) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps"}
    options |= {"save_steps": 1, "environment": "tests.environments.toys:Echo"}
    played(max_turns=2, **options).train()
    other = options | {"environment": "tests.environments.toys:Odd", "env_error_score": -1.0}
    with logged("with other settings") as warned:
        played(max_turns=3, **other).train(resume_from_checkpoint=True)
    (text,) = (text for text in warned.messages if "with other settings" in text)
    assert text.partition("settings: ")[2].split("; ") == [
        "env_error_score: 0.0 in the checkpoint, -1.0 now",
        'environment: "tests.environments.toys:Echo" in the checkpoint,'
        ' "tests.environments.toys:Odd" now',
        "max_turns: 2 in the checkpoint, 3 now",
    ]


class FirstTurnPays(Echo):
    """Some episodes get 100 in their first turn, all the same in the second."""

    later = 30.0

    def step(self, response: Any) -> Any:
        observation, _, done, truncated, info = super().step(response)
        paid = 100.0 * (response.ids[0] % 2) if self.turn == 1 else self.later
        return observation, paid, done, truncated, info


@pytest.mark.parametrize(
    "shape",
    [
        {"credit": "turn", "normalize_reward": True},
        {"credit": "turn", "reward_clip_range": 1.0},
        {"baseline": True},
        {"baseline": True, "normalize_reward": True},
    ],
    ids=str,
)
def test_turns_of_equal_rewards_have_no_advantage_however_scores_are_shaped(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    real = updater.make_experience

    def watched(rollout: Any, *rest: Any) -> Any:
        experience, metrics = real(rollout, *rest)
        seen.append((rollout.episodes.turn, experience.advantages))
        return experience, metrics

    monkeypatch.setattr(updater, "make_experience", watched)
    if "reward_clip_range" in shape:  # the share of a turn in a clipped sum depends on the others
        monkeypatch.setattr(FirstTurnPays, "later", 0.0)
    if "baseline" in shape:
        algorithm = reinforce_pp(normalize_advantage=False, **shape)
    else:
        algorithm = rloo(**shape)
    algorithm = without_reference(algorithm)
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "kl_coef": 0.0}
    played(environment=lambda: FirstTurnPays(2), algorithm=algorithm, **sizes).train()
    ((turn, advantages),) = seen
    assert float(advantages[turn == 0].abs().max()) > 0.5
    assert float(advantages[:, 0].sum()) == pytest.approx(0.0, abs=1e-4)  # groups have mean 0
    assert float(advantages[turn == 1].abs().max()) < 1e-5


def test_rows_without_a_prompt_are_those_with_an_empty_message() -> None:
    """Rows that only name their environment, or have other columns for ``reset``."""

    class Leveled(Echo):
        def reset(self, *, seed: int, options: Any) -> Any:
            self.turns = 1 + options["level"]
            return super().reset(seed=seed, options=options)

    bare = [{"environment": "echo", "level": i} for i in range(4)]
    filled = [row | {"prompt": [{"role": "user", "content": ""}]} for row in bare]
    scores = []
    for prompts in (bare, filled):
        parts = {"environment": {"echo": Leveled}, "eval_dataset": prompts[:3]}
        trainer = played(train_dataset=prompts, per_device_eval_batch_size=2, **parts)
        trainer.train()
        scores.append([row["objective/scores"] for row in rows(trainer)])
        metrics = trainer.evaluate()
        assert "eval_objective/scores" in metrics
        assert metrics["eval_environment/turns"] == 2  # of levels 0 to 2, each once
    assert scores[0] == scores[1]


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


NUMBERED = [row | {"number": 7 * i} for i, row in enumerate(TOOL_PROMPTS)]


class Numbered(Counter):
    """Counts its episodes; a reward function reads the score of the finished one."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.made.append(self)

    def reset(self, prompt: Any = None, number: int = 0, **columns: Any) -> None:  # type: ignore[override]
        self.value = number


def score_of_the_game(environments: list[Numbered], **_: Any) -> list[float]:
    """TRL's convention of public programs that play in environments."""
    return [float(environment.value) for environment in environments]


@pytest.mark.parametrize("schedule", ["in_order", "as_completed"])
def test_reward_functions_read_the_finished_environments(schedule: str, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    def check(number: list[int], environments: list[Numbered], **_: Any) -> list[float]:
        seen.extend(zip(number, (e.value for e in environments), strict=True))
        return [0.0] * len(number)

    Numbered.made.clear()
    made = tooled(
        GRPOTrainer, GRPOConfig, output_dir=str(tmp_path), environment_factory=Numbered,
        train_dataset=NUMBERED,
        reward_funcs=[score_of_the_game, check], rollout_schedule=schedule,
        max_lag=int(schedule == "as_completed"),
    )  # fmt: skip
    made.train()
    made.evaluate(NUMBERED)
    assert len(seen) >= 8
    assert all(number == value for number, value in seen)
    if schedule == "in_order":
        # Those of a batch of training and of the evaluation, and the one whose tools were checked.
        assert len(Numbered.made) == 17


class Closing(Echo):
    """Has the number of its row until it is closed."""

    def reset(self, *, seed: int, options: Any) -> Any:
        self.value = options["number"]
        return super().reset(seed=seed, options=options)

    def close(self) -> None:
        self.value = -1


class Tracker(TrainerCallback):
    """Fails after the first iteration, when two more batches are sampled."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            raise ConnectionError("the tracker is down")


@pytest.mark.parametrize(("lag", "resume"), [(0, True), (2, False)])
def test_responses_are_sampled_again_when_their_environments_are_gone(
    lag: int, resume: bool, tmp_path: Path
) -> None:
    """Every score read in the second call is the number of the row; 3 batches are left."""
    seen: list[tuple[int, int]] = []
    broken = resume

    def check(number: list[int], environments: list[Closing], **_: Any) -> list[float]:
        seen.extend(zip(number, (e.value for e in environments), strict=True))
        if broken and len(seen) > 8:
            raise RuntimeError("a fault of the second batch")
        return [float(e.value) for e in environments]

    def made() -> Any:
        return tooled(
            GRPOTrainer, GRPOConfig, output_dir=str(tmp_path), environment=Closing,
            train_dataset=NUMBERED, reward_funcs=check, max_lag=lag, steps=4,
            save_strategy="steps", save_steps=100,
        )  # fmt: skip

    first = made()
    if not resume:
        first.add_callback(Tracker())
    with pytest.raises(RewardError if resume else ConnectionError):
        first.train()
    seen.clear()
    broken = False
    if resume:
        first = made()
    first.train(resume_from_checkpoint=True if resume else None)
    assert first.engine.step == 4
    assert len(seen) == 3 * 8
    assert all(number == value for number, value in seen)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"environment": Echo, "tools": [calculator]}, "both decide how episodes are sampled"),
        ({"environment": Echo()}, "must be a class or a function that makes an environment"),
        ({"environment": Counter}, "passed as environment_factory="),
        ({"environment": "tests.environments.toys:Nothing"}, "does not define 'Nothing'"),
        ({"environment": "nowhere:Echo"}, "cannot import 'nowhere'"),
        ({"environment": "Echo"}, "must be module:Class, file.py:Class or the name"),
        ({"environment": "x.y:Z", "environment_kwargs": "[1]"}, "must be a dictionary"),
        (
            {"environment_kwargs": '{"turns": 2}', "reward_funcs": length_reward},
            "needs environment",
        ),
        ({"tools": [calculator]}, "no reward is configured"),
        ({"tools": [bare], "reward_funcs": length_reward}, "the tool bare needs type hints"),
        ({"environment_factory": object}, "object must have a method reset"),
        ({"environment_factory": Echo()}, "must be a class or a function .* got a Echo"),
        ({"environment_factory": Echo}, "with reset and step is passed as environment="),
        ({"tools": [calculator] * 2, "reward_funcs": length_reward}, "two tools are named 'calc"),
        ({"environment": Echo, "stop_token": None, "max_turn_tokens": None}, "turns that end"),
        (
            {"environment": Echo, "min_new_tokens": 20, "max_turn_tokens": 4},
            "min_new_tokens=20 must be at most max_turn_tokens=4",
        ),
        ({"environment": {"a": Echo}, "train_dataset": None}, "environments need a train_dataset"),
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


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A folder with a policy and a tokenizer."""
    policy().save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


LIMITS = {
    "environment_kwargs": '{"turns": 2}',
    "response_length": 30,
    "max_turn_tokens": 5,
    "on_env_error": "drop",
    "drop_reasoning": True,
}


def words(options: dict[str, Any]) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def test_the_command(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PPO on an environment, then its success on new seeds, with the same options."""
    out, game = tmp_path / "run", {"environment": "tests.environments.toys:Odd"} | LIMITS
    arguments = {
        "model_name_or_path": saved,
        **game,
        "output_dir": out,
        "stop_token": "eos",
        "per_device_train_batch_size": 4,
        "total_episodes": 8,
        **QUIET,
    }
    Odd.seeds.clear()
    assert main(["ppo", *words(arguments)]) in (0, None)
    assert '"environment/turns": 2.0' in (out / "metrics.jsonl").read_text()
    trained = {*Odd.seeds}
    gather = pytest.importorskip("kedge.ext.report.report").gather
    page = gather(out)
    for table, length in zip(
        page["tokens"], page["series"]["completions/mean_length"]["y"], strict=True
    ):
        scored = [row for row in table["rows"] if row["score"] is not None]
        assert length == pytest.approx(mean(sum(row["trained"]) for row in scored))
        assert {tuple(row["turn_rewards"]) for row in scored} <= {(0.5, 0.5), (0.5, 1.5)}
    assert page["played"]["won_by"] == "metric success"
    assert "dummy reward" not in capsys.readouterr().out

    Odd.seeds.clear()
    file, measured = (
        tmp_path / "episodes.jsonl",
        {"episodes": 40, "batch_size": 16, "temperature": 1},
    )
    assert main(["generate", str(out), *words(game | measured), "--output", str(file)]) in (0, None)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    seeds = [row["seed"] for row in rows]
    assert len({*seeds} & {*Odd.seeds}) == 40
    assert not {*seeds} & trained
    sound = [seed for seed in seeds if seed % 5]
    won = sum(seed % 2 for seed in sound)
    low, high = share_interval([[float(seed % 2)] for seed in sound])
    printed = capsys.readouterr().out.splitlines()[-5:]
    assert printed == [
        f"  success      {won / len(sound):.1%} (95%: {low:.1%} to {high:.1%}; metric success)",
        f"  score        {1 + won / len(sound):.4g}",
        "  turns        2",
        "  truncated    0.0%",
        f"  failed       {40 - len(sound)} episodes",
    ]
    assert [bool(row["error"]) for row in rows] == [seed % 5 == 0 for seed in seeds]
    i = seeds.index(sound[0])
    assert rows[i]["rewards"] == [0.5, 0.5 + sound[0] % 2]
    assert rows[i]["metrics"] == {"success": sound[0] % 2}
    roles = [message["role"] for message in rows[i]["completion"]]
    assert roles == ["assistant", "user", "assistant"]


def test_success_by_hand() -> None:
    """Without a metric a success is a score from the threshold."""
    rows = [
        {"score": x, "turns": n, "terminated": n < 4, "error": "", "metrics": {"moves": n}}
        for x, n in ((1.0, 2), (0.5, 4), (2.0, 3), (0.0, 3))
    ]
    result = measure_success([*rows, {"error": "broken"}], 1.0)
    assert result["success"] == 0.5
    assert result["truncated"] == 0.25
    assert (result["turns"], result["failed"]) == (3, 1)
    assert result["metrics"] == {"moves": 3}
    assert measure_success(rows, 0.4)["success"] == 0.75


def test_episodes_that_cannot_be_played(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given, text in (
        ({"environment": "tests.environments.toys:Odd"}, "--response_length"),
        ({"max_turns": 3}, "needs PROMPTS or --environment"),
    ):
        assert main(["generate", saved, *words(given)]) == 2
        assert text in capsys.readouterr().err
    assert main(["generate", saved, "prompts.jsonl", "--max_turns", "3"]) == 2
    assert "--max_turns has no effect without --environment" in capsys.readouterr().err
