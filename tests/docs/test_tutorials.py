"""Tutorials that are one program: their files and commands run as they stand, but smaller."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer

from .test_commands import ROOT, commands

pytest.importorskip("trl", reason="TRL is not installed (the extra sft)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]
SMALL = {
    "--episodes": "24",
    "--num_train_epochs": "1",
    "--max_steps": "3",
    "--total_episodes": "16",
    "--per_device_train_batch_size": "8",
    "--response_length": "40",
    "--max_new_tokens": "8",
}
LEARNS = ["--use_cpu", "True", "--disable_tqdm", "True"]


def run(page: str, place: Path) -> int:
    """Run the ``kedge`` and ``python`` commands of a page in order; returns their number."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    every = [*commands(text.replace("python ", "kedge python "))]
    for command in every:
        _, name, *words = shlex.split(command)
        for flag, value in SMALL.items():
            if flag in words:
                words[words.index(flag) + 1] = value
        if name == "python":
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
            continue
        code = main([name, *words, *(LEARNS if name in ("sft", "reward", "ppo") else [])])
        assert code == 0 or name == "doctor", command  # which has findings after three steps
    return len(every)


def read(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_your_own_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "own-agent.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert source.count("\n") <= 60
    (tmp_path / "shop.py").write_text(source)
    shutil.copytree(ROOT / "examples" / "agent", tmp_path / "examples" / "agent")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    assert run("own-agent.md", tmp_path) == 8
    runpy.run_path("shop.py", run_name="__main__")  # a second time, over the same database
    assert len(read(tmp_path / "runs" / "shop" / "episodes.jsonl")) == 24
    for name in ("before", "after"):
        rows = read(tmp_path / "runs" / "shop" / f"{name}.jsonl")
        assert len(rows) == 24
        assert all({"seed", "completion", "score"} <= row.keys() for row in rows)
    printed = capsys.readouterr().out
    assert printed.count("24 episodes are in") == 2
    assert printed.count("  success ") == 2
    log = read(tmp_path / "runs" / "shop" / "ppo" / "metrics.jsonl")
    assert [row["step"] for row in log if "environment/turns" in row] == [1, 2, 3]


def test_preferences_from_a_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    tables = re.findall(r"```csv\n(.*?)```", text, flags=re.DOTALL)
    words = re.findall(r"[\w.?]+", " ".join(tables))
    for name, table in zip(("tickets", "preferences"), tables, strict=True):
        head, *rows = table.splitlines()
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *rows * 8]) + "\n")
    tiny_policy(vocab_size=256).save_pretrained(tmp_path / "MODEL")
    word_tokenizer(words=sorted({*words})).save_pretrained(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    assert run("preferences.md", tmp_path) == 6
    answers = read(tmp_path / "after.jsonl")
    with (tmp_path / "tickets.csv").open() as file:
        tickets = [row["ticket"] for row in csv.DictReader(file)]
    assert [row["prompt"] for row in answers] == tickets
    assert len(tickets) == 24
    said = capsys.readouterr()
    assert "8 of 24 pairs are ties, and left out" in said.err
    assert json.loads((tmp_path / "runs" / "reward" / "held_out.json").read_text())["pairs"] == 1
    assert "win rate" in said.out
