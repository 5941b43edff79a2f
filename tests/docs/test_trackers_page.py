"""The example of the page on trackers runs, and leaves what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from transformers.integrations.integration_utils import rewrite_logs

from tests.e2e.small import small
from tests.e2e.test_groups import rloo

TRAINERS = {"ppo": small, "rloo": rloo}
PAGE = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("curves")
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


@pytest.mark.parametrize("method", ["ppo", "rloo"])
def test_runs_have_what_openrlbenchmark_filters_by(method: str, tmp_path: Path) -> None:
    """Through the renaming of transformers' callback for wandb, which adds ``train/``."""
    (filters,) = re.findall(r"--filters '\?(.*)'", PAGE)
    query = parse_qs(filters)
    wanted = {*query["metrics"], *query["xaxis"]}
    if method == "rloo":
        wanted -= {"train/loss/value_avg", "train/val/clipfrac_avg"}
    trainer = TRAINERS[method](output_dir=str(tmp_path))
    trainer.train()
    row = next(row for row in trainer.state.log_history if "objective/scores" in row)
    assert wanted - set(rewrite_logs(row)) == set()
    assert {*query["ceik"], *query["cen"]} <= trainer.args.to_sanitized_dict().keys()
