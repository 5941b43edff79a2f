"""The page on judging: its example runs, and the scripts at the end."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kedge.testing import tiny_policy
from tests.unit.judge_server import Server, reply
from tests.unit.text_toys import word_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "judging.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["low"] == names["high"] == 1.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tiny_policy(vocab_size=32).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"w{i} w4", "completion": "w5 w6"} for i in range(3, 10)]
    (tmp_path / "data").mkdir()
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "data" / "validation.jsonl").write_text(text)
    return tmp_path


def run(name: str, *flags: str) -> None:
    script = runpy.run_path(str(ROOT / "examples/scripts/evals" / name))
    script["main"](list(flags))


def test_the_scripts_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(lambda number, body: reply("Winner: A"))
    model, data = str(place / "model"), str(place / "data")
    try:
        run(
            "generate_tldr.py",
            *("--model_name_or_path", model, "--dataset_name", data, "--n", "5"),
            *("--max_new_tokens", "4", "--output_path", str(place / "tldr.csv")),
            *("--judge_url", server.url, "--judge_model", "j"),
        )
        said = capsys.readouterr().out
        counts = dict(re.findall(r"^(response[01])    (\d+)$", said, flags=re.MULTILINE))
        assert sum(map(int, counts.values())) == 5
        header, *lines = (place / "tldr.csv").read_text().splitlines()
        assert "preferred" in header
        assert len(lines) == 5
        run(
            "judge_tldr.py",
            *("--model_name_or_path", model, "--dataset_name", data, "--max_new_tokens", "4"),
            *("--judge_url", server.url, "--judge_model", "j", "--num_examples", "3"),
            *("--output_dir", str(place / "out"), "--concurrency", "2", "--engine", "embedded"),
        )
        summary = json.loads((place / "out" / "summary.json").read_text())
        assert summary["wins"] + summary["losses"] == 3
    finally:
        server.close()
