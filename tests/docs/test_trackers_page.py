"""The example of the page on trackers runs, and leaves what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {
        "folder": str(tmp_path),
        "tokenizer": word_tokenizer(),
        "model": tiny_policy(vocab_size=32),
        "prompts": [{"prompt": f"w{i} w{i + 1}"} for i in range(3, 12)],
        "length": lambda completions, **_: [float(len(c)) for c in completions],
    }
    exec(example, names)
    for left in ("metrics.jsonl", "run.json", "completions", "tokens", "curves.png", "README.md"):
        assert (tmp_path / left).exists(), left
    assert list(tmp_path.rglob("events*"))
    card = (tmp_path / "README.md").read_text()
    for title in ("Results", "Curves", "Command", "Hyperparameters", "Versions", "Citation"):
        assert f"## {title}" in card
