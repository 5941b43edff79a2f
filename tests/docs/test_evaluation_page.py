"""The example of the page on evaluation runs, and what it lists exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_the_example_runs_and_logs_what_the_page_lists(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {
        "folder": str(tmp_path),
        "tokenizer": word_tokenizer(),
        "model": tiny_policy(vocab_size=32),
        "prompts": [{"prompt": f"w{i} w{i + 1}"} for i in range(3, 12)],
        "held_out": [{"prompt": f"w{i} w4"} for i in range(12, 17)],
        "solves": lambda completions, **_: [float("w5" in c) for c in completions],
    }
    exec(example, names)
    rows = [row for row in names["trainer"].state.log_history if "eval_accuracy" in row]
    assert [row["step"] for row in rows] == [0, 4, 8]
    listed = set(re.findall(r"^\| `(eval_[^`.]*)`", PAGE, flags=re.MULTILINE))
    listed |= set(re.findall(r"`(eval_completions/[a-z_]+)`", PAGE))
    known = set().union(*rows) | {"eval_pass@k"}
    assert listed - known == set()
    assert (tmp_path / "start" / "eval.json").is_file()
