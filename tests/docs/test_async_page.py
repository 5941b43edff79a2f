"""The example of the page on sampling ahead runs, and what it lists exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from kedge import PPOConfig
from kedge.engine.metrics import NAMES
from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "async.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {
        "folder": str(tmp_path),
        "tokenizer": word_tokenizer(),
        "model": tiny_policy(vocab_size=32),
        "prompts": [{"prompt": f"w{i} w{i + 1}"} for i in range(3, 12)],
    }
    exec(example, names)
    assert names["trainer"].state.global_step == 3


def test_options_and_metrics_exist() -> None:
    named = set(re.findall(r"`((?:rollout/|sampler_correction|max_lag)[a-z_]*)`", PAGE))
    known = {f.name for f in fields(PPOConfig)} | set(NAMES)
    assert named - known == set()
