"""``kedge compare``: means and ranges by hand, and the picture of recorded runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.reporting.log import RunLog, band, ends

RUNS = Path(__file__).parents[1] / "data" / "doctor"


def run(*scores: float) -> RunLog:
    rows = [{"episode": 64.0 * (i + 1), "objective/scores": s} for i, s in enumerate(scores)]
    return RunLog("made", rows)


def test_bands_by_hand() -> None:
    found = band([run(1.0, 2.0, 3.0), run(3.0, 6.0)], "objective/scores")
    assert found is not None
    assert (found.x, found.mean) == ([64.0, 128.0], [2.0, 4.0])
    assert (found.low, found.high) == ([1.0, 2.0], [3.0, 6.0])
    assert band([run(1.0), run(2.0)], "objective/kl") is None
    assert ends([run(0.0, 0.0, 0.0, 0.0, 1.0), run(0.0, 3.0)], "objective/scores") == (
        2.0,
        1.0,
        3.0,
    )
    assert ends([run(1.0)], "val/ratio") is None
    assert ends([run(0.5, 9.0), run(1.5, 9.0)], "objective/scores", at="start") == (1.0, 0.5, 1.5)


def test_runs_are_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demos = ",".join(str(RUNS / f"good_demo_{i}.jsonl") for i in range(3))
    picture = tmp_path / "new" / "both.png"
    words = ["compare", f"demo={demos}", str(RUNS / "good.jsonl"), "--output", str(picture)]
    assert main(words) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "demo" in out
    assert "good.jsonl" in out
    assert re.search(r"\d -> -?\d\.\d+ \(-?\d\.\d+ \.\. \d\.\d+\)", out), out
    for metric in ("objective/scores", "policy/entropy_avg", "completions/mean_length"):
        assert metric in out  # whole, in 80 columns


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(RUNS / "good.jsonl")
    picture = ["--output", str(tmp_path / "x.png")]
    assert main(["compare", "=", *picture]) == 2
    assert main(["compare", good, "--metrics", "no/such", *picture]) == 2
    assert "no run has any of no/such" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), *picture]) == 2
