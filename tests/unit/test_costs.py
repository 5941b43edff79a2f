"""The model of cost: operations counted by hand, bounds, and the split that it proposes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kedge.cli.main import main
from kedge.cli.planning import costs
from kedge.cli.planning.memory import Shape
from kedge.cli.planning.plan_split import Asked, take_flags
from kedge.errors import ConfigError
from kedge.testing import tiny_policy

from .text_toys import word_tokenizer

SHAPE = Shape(hidden=8, layers=2, intermediate=32, cache=16, vocab=100)
MODEL = costs.Model(body=1000, shape=SHAPE)
JOB = costs.Job(
    policy=MODEL, value=MODEL, reward=MODEL, reference=True, rows=4, prompt=6, response=10, epochs=2
)
DEVICE = costs.Hardware(name="d", flops=1e6, bandwidth=1e6, link=1e5, width=4)


def test_operations_by_hand() -> None:
    # 64 tokens; each sees 8 others on average: 2 x 1000 + 4 x 2 x 8 x 8 = 2512 operations.
    forward, head = 64 * 2512, 40 * 2 * 8 * 100
    assert costs.operations(JOB) == {
        "generate": 24 * (2000 + 64 * 3) + 40 * (2000 + 64 * 11) + head,
        "reward": forward,
        "annotate": 2 * (forward + head) + forward,
        "train": 2 * 3 * (2 * forward + head),
        "sync": 0.0,
    }


def test_what_changes_operations_and_by_how_much() -> None:
    plain = costs.operations(JOB)
    again = costs.operations(replace(JOB, checkpointing=True))
    assert again["train"] == plain["train"] * 4 / 3
    assert costs.operations(replace(JOB, epochs=6))["train"] == 3 * plain["train"]
    shared = costs.operations(replace(JOB, group=4))["generate"]
    assert plain["generate"] - shared == 18 * (2000 + 64 * 3)  # three of four prompts
    bare = costs.operations(replace(JOB, reward=None, reference=False, value=None, recorded=True))
    assert bare["reward"] == bare["annotate"] == 0


def test_a_step_of_sampling_takes_no_less_than_its_bytes() -> None:
    fast = replace(DEVICE, flops=1e15)
    one = costs.plan_split(JOB, fast, learners=1, engines=1)
    read = 10 * (1800 + 4 * 2 * 16 * 11) * 4 / 1e6
    assert one.seconds["generate"] == pytest.approx(read)
    many = costs.plan_split(JOB, fast, learners=1, engines=4)
    assert many.seconds["generate"] > read / 2  # weights are read by each of them


def test_an_update_is_the_longer_side_or_the_sum() -> None:
    turn = costs.plan_split(JOB, DEVICE, learners=4, engines=0)
    assert turn.update == pytest.approx(sum(turn.seconds.values()))
    assert turn.seconds["sync"] == 0
    apart = costs.plan_split(JOB, DEVICE, learners=3, engines=1)
    assert apart.update == max(apart.sampling, apart.learning)
    assert apart.seconds["sync"] == pytest.approx(1800 * 4 / 1e5)


def test_splits_are_all_there_and_sorted() -> None:
    found = costs.splits(JOB, DEVICE, 8)
    assert sorted(s.engines for s in found) == list(range(8))
    assert all(s.learners + s.engines == 8 or s.engines == 0 for s in found)
    assert [s.update for s in found] == sorted(s.update for s in found)


def test_this_machine_is_measured() -> None:
    device = costs.measured()
    assert 1e9 < device.flops < 1e14
    assert 1e8 < device.bandwidth < 1e12


def test_the_flags() -> None:
    asked, rest = take_flags(["--a", "1", "--hardware", "h100", "--devices=3", "--b"])
    assert (asked, rest) == (Asked("h100", 3), ["--a", "1", "--b"])
    with pytest.raises(ConfigError, match="--hardware tpu must be one of a100, h100, h200, cpu"):
        take_flags(["--hardware", "tpu"])
    with pytest.raises(ConfigError, match="--devices none must be a whole number"):
        take_flags(["--devices", "none"])


def test_the_plan_says_where_the_time_goes(tmp_path, capsys) -> None:
    tiny_policy(vocab_size=32).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    flags = ["--model_name_or_path", str(tmp_path), "--use_cpu"]  # on Ray, wherever that is
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def f(completions):\n    return [0.0] * len(completions)\n")
    flags += ["--reward_funcs", f"{rewards}:f", "--total_episodes", "640"]
    assert main(["plan", "async-ppo", *flags, "--hardware", "h100", "--devices", "3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "seconds of an update on H100, estimated" in said
    assert "1 learn, 1 sample" in said
    assert "fastest with 3:" in said
