"""``kedge judge``: judges, files, and mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.testing import tiny_reward_model

from .judge_server import BAD, GOOD, PROMPTS, honest, reply, serving
from .text_toys import word_tokenizer

serve = pytest.fixture(serving)


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    ours = [
        {"prompt": p, "completion": g, "reference": b}
        for p, g, b in zip(PROMPTS, GOOD, BAD, strict=True)
    ]
    theirs = [{"prompt": p, "completion": b} for p, b in zip(PROMPTS[::-1], BAD[::-1], strict=True)]
    return write(tmp_path / "ours.jsonl", ours), write(tmp_path / "theirs.jsonl", theirs)


def test_the_command_with_an_endpoint(
    files: tuple[str, str], serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, out = serve(honest), tmp_path / "out"
    flags = ["--endpoint", server.url, "--model", "m", "--output_dir", str(out)]
    flags += ["--price_in", "2", "--price_out", "10"]
    assert main(["judge", *files, *flags]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["win_rate"] == 1.0
    assert summary["cost"] == pytest.approx((440 * 2 + 120 * 10) / 1e6)
    lines = (out / "judgments.jsonl").read_text().splitlines()
    assert len(lines) == 40
    assert json.loads(lines[3])["ours"] == "good 3"
    assert json.loads(lines[3])["theirs"] == "bad 3"  # by prompt, not by place
    assert len((out / "judgments.csv").read_text().splitlines()) > 40
    assert "100.0%" in capsys.readouterr().out
    assert main(["judge", *files, *flags]) == 0
    assert len(server.asked) == 40


def test_everything_asked_is_written_also_what_no_file_can_hold(serve: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "half \ud800", "completion": "good \udfff", "reference": "=1+1"},
        {"prompt": "@p", "completion": "-3.5e2", "reference": "\tx"},
    ]
    ours, out = write(tmp_path / "ours.jsonl", rows), tmp_path / "out"
    server = serve(lambda number, body: reply("=HYPERLINK(1) \ud83d\nWinner: A"))
    flags = ["--endpoint", server.url, "--model", "m", "--output_dir", str(out)]
    assert main(["judge", ours, "@reference", *flags]) == 0
    kept = [json.loads(line) for line in (out / "judgments.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["ours"], row["theirs"]) for row in kept] == [
        tuple(row.values()) for row in rows
    ]
    with (out / "judgments.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["reply"] for row in table] == ["'=HYPERLINK(1) \ufffd\nWinner: A"] * 2
    assert [row["prompt"] for row in table] == ["half \\ud800", "'@p"]
    assert [row["ours"] for row in table] == ["good \\udfff", "-3.5e2"]  # a number is no formula
    assert [row["theirs"] for row in table] == ["'=1+1", "'\tx"]


def test_a_folder_that_cannot_be_written_costs_no_question(
    files: tuple[str, str], serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, taken = serve(honest), tmp_path / "taken"
    taken.write_text("")
    for folder in ("", str(taken), str(taken / "below")):
        flags = ["--endpoint", server.url, "--model", "m", "--output_dir", folder]
        assert main(["judge", *files, *flags]) == 2
        assert "--output_dir" in capsys.readouterr().err
    assert server.asked == []


def test_the_command_with_functions_and_a_reference_column(
    files: tuple[str, str], tmp_path: Path
) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def longer(prompts, answers):\n    return [len(a) for a in answers]\n")
    flags = ["--score", f"{code}:longer", "--output_dir", str(tmp_path / "out"), "--limit", "5"]
    assert main(["judge", files[0], "@reference", *flags]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["prompts"], summary["wins"]) == (5, 5)


def test_the_command_with_a_reward_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_reward_model(vocab_size=32).save_pretrained(model)
    word_tokenizer().save_pretrained(model)
    rows = [{"prompt": "w3 ", "completion": f"w{i} w5", "reference": "w7"} for i in range(3, 9)]
    ours = write(tmp_path / "ours.jsonl", rows)
    flags = ["--reward_model", str(model), "--output_dir", str(tmp_path / "out")]
    assert main(["judge", ours, "@reference", *flags]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["wins"] + summary["losses"] + summary["ties"] == 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--endpoint", "http://x"], "--endpoint needs --model"),
        (["--function", "none.py:f"], "none.py"),
        ([], "one of the arguments"),
    ],
)
def test_mistakes_are_one_line(
    change: list[str], said: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", *files, *change]) == 2
    assert said in capsys.readouterr().err


def test_missing_files_columns_and_prompts_are_named(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = ["--score", "x.py:f", "--output_dir", str(tmp_path / "out")]
    for ours, theirs, said in (
        (files[0], "nothing.jsonl", "the file nothing.jsonl does not exist"),
        (files[0], "@gold", "has no text in column 'gold'"),
        (
            files[0],
            write(tmp_path / "few.jsonl", [{"prompt": "a", "completion": "b"}]),
            "too few answers to 40",
        ),
        (write(tmp_path / "list.jsonl", [[1]]), files[1], "line 1 is not a JSON object"),  # type: ignore[list-item]
    ):
        assert main(["judge", ours, theirs, *score]) == 2
        assert said in capsys.readouterr().err
