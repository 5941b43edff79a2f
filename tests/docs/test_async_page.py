"""The example of the page on sampling ahead runs, and what it lists exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kedge import PPOConfig
from kedge.loop.metrics import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "async.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("demo")
def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["trainer"].state.global_step == 3


def test_options_and_metrics_exist() -> None:
    named = set(re.findall(r"`((?:rollout/|sampler_correction|max_lag)[a-z_]*)`", PAGE))
    known = {f.name for f in fields(PPOConfig)} | set(NAMES)
    assert named - known == set()
