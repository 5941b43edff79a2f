"""The demo with little training: it runs to the end and leaves what it promises."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests import processes

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = ["-W", "ignore", str(EXAMPLES / "demo" / "run.py")]


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / "demo"))
    return importlib.import_module("task")


def test_the_gold_judge_by_hand(task: Any) -> None:
    facts = {"name": "mia", "color": "red", "animal": "fox", "place": "harbour", "day": "monday"}
    post = task.Post(facts, "the sky was grey", "")
    perfect = "mia saw a red fox at the harbour on monday ."
    assert task.judge(post, perfect) == pytest.approx(1.0)
    assert task.judge(post, perfect[:-2]) == pytest.approx(0.5)
    assert task.judge(post, "") == pytest.approx(-0.5)
    assert task.judge(post, "mia saw a fox .") == pytest.approx(0.4)
    assert task.judge(post, "mia saw a blue fox .") == pytest.approx(0.0)
    assert task.judge(post, "mia saw a fox and on monday on monday .") == pytest.approx(0.4)
    assert task.judge(post, perfect + " and the sky was grey .") == pytest.approx(0.8)
    written = task.write_post(random.Random(0))
    assert task.read_post(written.text) == written
    told = task.write_summary(written, random.Random(0), care=1.0)
    assert task.gold([written.text], [told]) == [pytest.approx(1.0)]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra sft")
def test_quick_demo(tmp_path: Path) -> None:
    words = [*RUN, "--quick", "--output_dir", str(tmp_path)]
    done = processes.run(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) >= {
        *("score_start", "score_end", "kl", "win_rate_start", "win_rate"),
        *("episodes_per_second", "seconds", "win_rate_perfect"),
    }
    assert (tmp_path / "ppo" / "model.safetensors").is_file()
    assert (tmp_path / "ppo" / "value_model" / "model.safetensors").is_file()
    assert (tmp_path / "ppo" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "completions.jsonl").read_text().splitlines()) == 32
    assert "gold win rate" in done.stdout
    seen = json.loads((tmp_path / "exchanges" / "exchanges.json").read_text())
    assert f"misses {sum(s <= 0.5 for s in seen.values())} of 60 wrong values" in done.stdout
    again = processes.run(*words)
    assert "ppo (done before)" in again.stdout
    assert "kedge ppo" not in again.stdout
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    other = processes.run(*words, "--seeds", "1")
    assert other.returncode == 2
    assert "has a run with {'seed': 0, " in other.stderr
    loop = ["-W", "ignore", str(EXAMPLES / "minimal_ppo.py")]
    options = ["--demo", str(tmp_path), "--output_dir", str(tmp_path / "minimal")]
    shown = processes.run(*loop, *options, "--iterations", "2").stdout
    first, second, _ = shown.splitlines()
    assert "kl  0.000" in first  # the policy starts as the reference
    assert "kl  0.000" not in second
    assert (tmp_path / "minimal" / "value_model" / "model.safetensors").is_file()
