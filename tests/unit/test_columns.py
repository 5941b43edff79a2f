"""Columns by name: prompts, completions, and preferences with two answers and a winner."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from kedge.cli.data import name_columns, read_winners
from kedge.cli.main import commands, main
from kedge.records.errors import DataError

TICKETS = {"ticket": ["w3 w4", "w5"], "reply": ["w6", "w7"], "prompt": ["no", "no"]}


def test_columns_get_the_names_that_training_reads() -> None:
    rows = name_columns(Dataset.from_dict(TICKETS), {"prompt": "ticket", "completion": "reply"})
    assert rows[1] == {"prompt": "w5", "completion": "w7"}  # the other column prompt is dropped
    swapped = name_columns(rows, {"prompt": "completion", "completion": "prompt"})
    assert swapped[1] == {"prompt": "w7", "completion": "w5"}
    assert name_columns(rows, {"prompt": None})[0] == rows[0]


@pytest.mark.parametrize(
    ("winners", "first_wins"),
    [
        (["a", "b", "A", "B"], [True, False, True, False]),
        ([1, 2, 1, 2], [True, False, True, False]),
        ([1.0, 2.0, None, 1.0], [True, False, True]),  # a CSV with an empty cell
        ([" one", "tie", "", "TWO"], [True, False]),  # names of the columns
        (["x0", "y1", "y2", "x3"], [True, False, False, True]),  # texts of the answers
    ],
)
def test_a_winner_is_a_letter_a_number_a_column_or_a_text(
    winners: list[Any], first_wins: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"one": ["x0", "x1", "x2", "x3"], "two": ["y0", "y1", "y2", "y3"], "w": winners}
    rows = read_winners(Dataset.from_dict({"prompt": [*"0123"], **columns}), "one", "two", "w")
    assert rows.column_names == ["prompt", "chosen", "rejected"]
    assert [row["chosen"][0] == "x" for row in rows] == first_wins
    assert all(row["chosen"][1] == row["prompt"] == row["rejected"][1] for row in rows)
    ties = 4 - len(first_wins)
    said = f"{ties} of 4 pairs are ties, and left out" if ties else ""
    assert capsys.readouterr().err.strip() == (said and f"kedge: {said}")


def test_equal_answers_are_a_tie() -> None:
    rows = Dataset.from_dict({"a": ["x", "x"], "b": ["x", "y"], "winner": ["a", "b"]})
    assert read_winners(rows, "a", "b", "winner").to_list() == [{"chosen": "y", "rejected": "x"}]
    with pytest.raises(DataError, match="names no winner: all 1 pairs are ties"):
        read_winners(rows.select([0]), "a", "b", "winner")


def test_mistakes_name_the_column_the_row_and_what_exists() -> None:
    rows = Dataset.from_dict({"a": ["x", "y"], "b": ["z", "z"], "winner": ["a", "left"]})
    with pytest.raises(DataError, match="--winner_column winner, row 2: 'left' is neither a, b"):
        read_winners(rows, "a", "b", "winner")
    with pytest.raises(DataError, match="--a_column one does not exist; columns: a, b, winner"):
        read_winners(rows, "one", "b", "winner")
    with pytest.raises(DataError, match="--prompt_column body does not exist; columns: a, b, win"):
        name_columns(rows, {"prompt": "body"})


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sft --prompt_column body", "--prompt_column body does not exist; columns: ticket, x, y"),
        ("sft --prompt_column ticket", "--prompt_column and --completion_column name columns"),
        ("reward --prompt_column ticket", "--winner_column, --a_column and --b_column read two"),
        ("reward --a_column x", "--a_column and --b_column need --winner_column"),
        ("reward --winner_column best --a_column x --b_column z", "--b_column z does not exist"),
        ("generate --prompt_column body", "--prompt_column body does not exist"),
    ],
)
def test_every_command_names_columns_alike(
    command: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, *words = command.split()
    if kind not in commands():
        pytest.skip("the command is an extension, which is not here")
    pytest.importorskip("trl", reason="TRL is not installed (the extra sft)")
    from kedge.testing import tiny_policy
    from tests.unit.text_toys import word_tokenizer

    tiny_policy(vocab_size=32).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    row = {"ticket": "w3", "x": "w4", "y": "w5", "best": "y"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    model, data = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    given = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir"]
    words += [model, data] if kind == "generate" else [*given, str(tmp_path / "out"), "--use_cpu"]
    assert main([kind, *words]) == 2
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)
