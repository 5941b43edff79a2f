"""A small model learns sums from a verifier: the example, whole."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests import processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"


def test_the_careless_never_carry() -> None:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import run
    finally:
        sys.path.remove(str(EXAMPLE))
    assert [run.careless(p) for p in ("12+34=", "37+48=", "90+20=", "55+55=")] == [
        *("46", "75", "10", "0")
    ]
    train, held_out = run.problems()
    assert len(held_out) == 500
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
    right = sum(run.careless(p["prompt"]) == p["ground_truth"] for p in held_out) / 500
    assert right < 0.4  # what the model can at best learn to say from the majority


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the pipeline extra")
def test_from_at_most_two_in_five_to_nine_in_ten(tmp_path: Path) -> None:
    run = ["-W", "ignore", str(EXAMPLE / "run.py"), "--output_dir", str(tmp_path)]
    run += ["--iterations", "30"]
    done = processes.run(*run)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_start"] <= 0.4
    assert summary["accuracy"] >= 0.9
