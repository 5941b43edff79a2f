"""The example of the page on trackers runs, and leaves what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")


def test_the_example_runs(demo: Path) -> None:
    pytest.importorskip("tensorboard")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    folder = demo / "runs" / "tracked"
    exec(example, names)
    for left in ("metrics.jsonl", "run.json", "completions", "tokens", "curves.png", "README.md"):
        assert (folder / left).exists(), left
    assert list(folder.rglob("events*"))
    card = (folder / "README.md").read_text()
    for title in ("Results", "Curves", "Command", "Hyperparameters", "Versions", "Citation"):
        assert f"## {title}" in card
