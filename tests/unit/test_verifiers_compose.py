"""Verifiers chosen by a column, and datasets in proportion."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from kedge.cli.arguments import parse
from kedge.cli.data import load_prompts
from kedge.data.mixer import choose_rows, mix, parse_mixer
from kedge.errors import ConfigError, DataError, RewardError
from kedge.verifiers import VERIFIERS, ByColumn, by_column, gsm8k, r1_style_format


def constant(completions: list[str]) -> list[float]:
    return [0.25] * len(completions)


def by_length(completions: list[str], prompts: list[str], limit: list[int]) -> list[float | None]:
    return [
        None if not p else float(len(c) < n)
        for c, p, n in zip(completions, prompts, limit, strict=True)
    ]


def test_each_row_goes_to_its_verifier() -> None:
    verify = by_column()
    scores = verify(
        ["The answer is 4", "4", "no commas", r"\boxed{1/2}", "Paris", "x", "4"],
        dataset=["gsm8k", "gsm8k", "ifeval", "math", "string_match", None, "gsm8k"],
        ground_truth=[
            "4", "5", {"instruction_id_list": ["punctuation:no_comma"]}, r"\frac12", "paris", None,
            "#### 4",
        ],
    )  # fmt: skip
    assert scores == [1.0, 0.0, 1.0, 1.0, 1.0, None, 1.0]


def test_several_verifiers_per_row_add_up() -> None:
    verify = by_column({"constant": constant}, weights={"constant": 4.0})
    scores = verify(
        ["4", "4"],
        dataset=[["gsm8k", "constant"], ["constant"]],
        ground_truth=[["4", None], [None]],
    )
    assert scores == [2.0, 1.0]


def test_a_verifier_sees_its_own_rows_of_every_column() -> None:
    verify = ByColumn({"short": by_length, "gsm8k": gsm8k.on("elsewhere")}, truth="limit")
    scores = verify(
        ["abc", "7", "abc", "abc"],
        prompts=["p", "q", "r", ""],
        dataset=["short", "gsm8k", "short", "short"],
        limit=[4, "7", 3, 9],
        log_extra=print,
    )
    assert scores == [1.0, 1.0, 0.0, None]


@pytest.mark.parametrize("name", ["gsm", "GSM9K", "", 3, ["gsm8k", ["gsm8k"]]])
def test_an_unknown_name_is_an_error(name: Any) -> None:
    verify = by_column()
    truth = ["4", "4"] if isinstance(name, list) else "4"
    with pytest.raises(RewardError, match="unknown verifier"):
        verify(["4"], dataset=[name], ground_truth=[truth])
    with pytest.raises(RewardError, match="row 1"):
        verify.check(["gsm8k", name])


def test_names_are_suggested_and_renamed() -> None:
    with pytest.raises(RewardError, match="the nearest is gsm8k"):
        by_column()(["4"], dataset=["gsm8"], ground_truth=["4"])
    verify = by_column(rename={"openai/gsm8k": "gsm8k"})
    assert verify(["4"], dataset=["openai/gsm8k"], ground_truth=["4"]) == [1.0]
    verify.check(["openai/gsm8k", None, ["math", "gsm8k"]])


def test_ground_truths_must_match_the_names() -> None:
    with pytest.raises(RewardError, match="must be a list of 2 ground truths"):
        by_column()(["4"], dataset=[["gsm8k", "math"]], ground_truth=["4"])
    with pytest.raises(RewardError, match="column 'dataset'"):
        by_column()(["4"], ground_truth=["4"])


def test_bad_verifiers_are_errors() -> None:
    with pytest.raises(ConfigError, match="verifiers must not be empty"):
        ByColumn({})
    with pytest.raises(ConfigError, match="'x' must be"):
        ByColumn({"x": 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="unknown verifier 'maths'"):
        by_column(weights={"maths": 2.0})
    short = ByColumn({"x": lambda completions: [1.0]})
    with pytest.raises(RewardError, match="1 rewards for 2"):
        short(["a", "b"], dataset=["x", "x"], ground_truth=[0, 0])
    odd = ByColumn({"x": lambda completions: [float("nan")]})
    with pytest.raises(RewardError, match="returned nan"):
        odd(["a"], dataset=["x"], ground_truth=[0])


def test_it_reports_rates() -> None:
    seen: dict[str, float] = {}
    counted: set[float] = set()
    verify = by_column({"constant": constant})
    verify(
        ["4", "5", "6"],
        dataset=["gsm8k", "gsm8k", "constant"],
        ground_truth=["4", "4", None],
        log_metric=lambda name, value, weight: seen.update({name: value}) or counted.add(weight),
    )
    assert seen == {
        "gsm8k_reward": 0.5,
        "gsm8k_correct_rate": 0.5,
        "constant_reward": 0.25,
        "constant_correct_rate": 1.0,
        "verifiable_reward": pytest.approx(1.25 / 3),
        "verifiable_correct_rate": pytest.approx(2 / 3),
    }
    assert counted == {1, 2, 3}  # rows behind each


def test_parse_mixer() -> None:
    parts = [("name", 0.5), ("other", 400)]
    assert (
        parse_mixer("name 0.5 other 400") == parse_mixer(["name", "0.5", "other", "400"]) == parts
    )
    assert parse_mixer("a 1.0 b 1") == [("a", 1.0), ("b", 1)]


@pytest.mark.parametrize(
    "mixer", ["", "name", "name 0.5 other", "name 0", "name -1", "name 0.0", "name x", "name 1e3",
              "name nan", "name inf", "0.5 name"],
)  # fmt: skip
def test_bad_mixers_are_errors(mixer: str) -> None:
    with pytest.raises(DataError, match=r"name 0\.5 other 400"):
        parse_mixer(mixer)


def test_rows_chosen() -> None:
    half = choose_rows("a", 0.5, 10, seed=0, position=0)
    assert len(set(half)) == len(half) == 5
    assert half == choose_rows("a", 0.5, 10, seed=0, position=0)
    assert half != choose_rows("a", 0.5, 10, seed=1, position=0)
    assert half != choose_rows("a", 0.5, 10, seed=0, position=1)
    assert choose_rows("a", 1.0, 3, seed=0, position=0) == [0, 1, 2]
    many = Counter(choose_rows("a", 7, 3, seed=0, position=0))
    assert sorted(many.values()) == [2, 2, 3]
    with pytest.raises(DataError, match="takes no row of 'a', which has 3"):
        choose_rows("a", 0.1, 3, seed=0, position=0)
    with pytest.raises(DataError, match="which has 0"):
        choose_rows("a", 3, 0, seed=0, position=0)


def test_mix() -> None:
    sources = {
        "a": Dataset.from_dict({"prompt": ["a0", "a1", "a2", "a3"]}),
        "b": Dataset.from_dict({"prompt": ["b0", "b1"], "answer": [1, 2]}),
    }
    mixed = mix("a 0.5 b 3", sources.__getitem__, seed=3, name_column="dataset")
    assert mixed["dataset"][:] == ["a"] * 2 + ["b"] * 3
    assert mixed["answer"][:2] == [None, None]
    assert set(mixed["prompt"][2:]) == {"b0", "b1"}
    again = mix("a 0.5 b 3", sources.__getitem__, seed=3, name_column="dataset")
    assert mixed[:] == again[:]


def test_mix_errors() -> None:
    one = Dataset.from_dict({"prompt": ["a"], "x": [1]})
    other = Dataset.from_dict({"prompt": ["a"], "x": [["list"]]})
    with pytest.raises(DataError, match="cannot be concatenated"):
        mix("a 1 b 1", {"a": one, "b": other}.__getitem__)
    with pytest.raises(DataError, match="already has a column 'x'"):
        mix("a 1", {"a": one}.__getitem__, name_column="x")


def test_the_command_line_mixes(tmp_path: Path) -> None:
    for name, rows in (("a", 40), ("b", 2)):
        lines = (json.dumps({"prompt": f"{name}{row}"}) for row in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    given = [str(tmp_path / "a.jsonl"), "0.5", str(tmp_path / "b.jsonl"), "6"]
    flags = ["--model_name_or_path", "m", "--reward_funcs", "r.py:f"]
    flags += ["--dataset_mixer_list", *given]
    train, test = load_prompts(parse(flags, prog="kedge ppo"))
    assert Counter(prompt[0] for prompt in train["prompt"]) == {"a": 20, "b": 6}
    assert test is None
    train, test = load_prompts(parse([*flags, "--do_eval", "--eval_steps", "1"], prog="kedge ppo"))
    assert (len(train), len(test)) == (24, 2)
    with pytest.raises(DataError, match="set only one"):
        load_prompts(parse([*flags, "--dataset_name", given[0]], prog="kedge ppo"))


@pytest.mark.parametrize(
    "name", ["gsm8k", "math", "ifeval", "code", "regex", "string_match", "exact_match",
             "string_contains", "string_f1"],
)  # fmt: skip
def test_verifiers_can_be_named_and_pickled(name: str) -> None:
    copy = pickle.loads(pickle.dumps(VERIFIERS[name]))
    assert copy.__name__ == VERIFIERS[name].__name__  # type: ignore[attr-defined]
    assert copy.on("answer").column == "answer"
    assert pickle.loads(pickle.dumps(r1_style_format))(["</think><answer>a</answer>"]) == [1.0]
