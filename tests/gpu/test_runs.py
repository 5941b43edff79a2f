"""Whole runs of every trainer on a GPU: the numbers of a CPU in float32, close ones in bf16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.strict_runs import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def report() -> Any:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.e2e.strict_runs", "cuda"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_runs_on_a_gpu_have_the_numbers_of_a_cpu(report: Any, name: str) -> None:
    cpu, cuda = (report["runs"][name][device] for device in ("cpu", "cuda"))
    assert len(cpu["rows"]) == len(cuda["rows"]) >= 3
    # bf16: operations differ in where they round
    limits = {"rel": 0.3, "abs": 0.1} if "bf16" in name else {"rel": 1e-3, "abs": 1e-4}
    for row, expected in zip(cuda["rows"], cpu["rows"], strict=True):
        assert row == pytest.approx(expected, **limits)
