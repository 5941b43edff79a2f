"""Each trainer's default run on an accelerator: no mixing of devices, and the numbers of a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAINERS = [
    *("ppo_reward_model", "ppo_functions", "rloo_older", "rloo_newer", "grpo"),
    *("lag_0", "lag_1", "classic"),
]


def test_default_runs_on_an_accelerator_have_the_numbers_of_a_cpu() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.e2e.strict_runs"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads(done.stdout)
    assert report["contract"] == {
        "values": [4.0, 2.0, 2.0, 2, 4.0],
        "waits": {
            f"{kind} elsewhere": 1 for kind in ("item", "tolist", "boolean index", "to host")
        },
    }
    assert list(report["runs"]) == TRAINERS
    for name, found in report["runs"].items():
        assert len(found["cpu"]) == len(found["strict"]) >= 3, name
        for row, expected in zip(found["strict"], found["cpu"], strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-6), name
