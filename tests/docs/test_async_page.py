"""The example of the page on sampling ahead runs, and what it lists exists."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kedge import PPOConfig
from kedge.loop.metrics import NAMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "async.md").read_text(encoding="utf-8")


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


def test_two_simulators_agree_and_the_page_has_the_figures_of_the_first() -> None:
    results = ROOT / "benchmarks" / "results"
    recorded = json.loads((results / "dispatch.json").read_text())["simulation"]
    case = ("engines", "sigma", "load", "in_flight", "max_lag")
    first = {tuple(row[name] for name in case): row for row in recorded}
    tables = {0.985: PAGE.split("Sigma 0.985:")[1], 0.5: PAGE.split("Sigma 0.5:")[1]}
    for row in json.loads((results / "dispatch_check.json").read_text()):
        want = first[tuple(row[name] for name in case)]
        (line,) = re.findall(
            rf"^\| {row['engines']} \| {row['max_lag']} \|.*", tables[row["sigma"]], re.M
        )[:1]
        place = 3 + 2 * row["in_flight"] + (row["load"] > 0)
        for name, cell in (("trained", place), ("trained_mask_old", place + 2 * row["in_flight"])):
            assert row[name] == pytest.approx(want[name], abs=0.03)
            assert line.split("|")[cell].strip() == f"{want[name]:.2f}"
