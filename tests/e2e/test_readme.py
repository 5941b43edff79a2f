"""The first run of "Getting started", as it stands there, on the demo's supervised model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from kedge.cli.main import main
from tests import processes

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra sft"),
]


def python(*words: str) -> str:
    """Run Python in this folder; what it prints."""
    done = processes.run("-W", "ignore", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_first_run_learns_and_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'examples' / 'demo')!r}); import run; "
    program += "sizes = run.Sizes(compared=1, supervised=14_400); "
    python("-c", program + "run.train_supervised(run.Path('runs/demo'), 0, sizes)")
    page = (ROOT / "docs" / "getting-started.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    printed = python("-c", source)
    assert "kedge: the run is in runs/short; `kedge report runs/short` writes" in printed
    assert len(re.findall(r"^step \d+/20  ", printed, re.MULTILINE)) == 11
    told = re.findall(r"^(before|after): \w+ .*posts: (-?\d\.\d+)\)$", printed, re.MULTILINE)
    scores = {when: float(score) for when, score in told}
    assert scores["after"] >= scores["before"] + 0.1, scores
    main(["doctor", "runs/short"])  # a value that explains little is all that it may find here
    found = re.findall(r"^    (\w.*?): ", capsys.readouterr().out, re.MULTILINE)
    assert [name for name in found if name not in ("try", "the value explains nothing")] == []
    assert main(["report", "runs/short"]) == 0
