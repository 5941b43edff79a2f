"""The example of the page on evaluation runs, and what it lists exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_the_example_runs_and_logs_what_the_page_lists(demo: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    rows = [json.dumps({"prompt": f"w{i} w4"}) + "\n" for i in range(12, 17)]
    (demo / "runs" / "demo" / "data" / "held_out.jsonl").write_text("".join(rows))
    names: dict[str, Any] = {}
    exec(example, names)
    logged = [row for row in names["trainer"].state.log_history if "eval_accuracy" in row]
    assert [row["step"] for row in logged] == [0, 4, 8]
    listed = set(re.findall(r"^\| `(eval_[^`.]*)`", PAGE, flags=re.MULTILINE))
    listed |= set(re.findall(r"`(eval_completions/[a-z_]+)`", PAGE))
    known = set().union(*logged) | {"eval_pass@k"}
    assert listed - known == set()
    assert [*names["trainer"].state.initial_scores] == ["eval_"]
