"""vLLM on a GPU: it samples from the policy, and gets its weights at every sync.

Each run has a process, since vLLM keeps memory until its process ends.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.vllm_runs import CASES, ITERATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None,
        reason="needs a CUDA device and vLLM",
    ),
]


@pytest.mark.parametrize("name", CASES)
def test_runs_with_vllm_on_a_gpu(name: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.vllm_runs", name]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    reports = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert reports, done.stderr[-6000:]
    rows = json.loads(reports[0].removeprefix("REPORT "))
    assert len(rows) == ITERATIONS  # every one after a verified weight sync
    assert rows[-1]["version"] >= ITERATIONS - 1 - 2
    limit = 1e-3 if "float32" in name else 0.05  # nats per token
    keys = ("rollout/sync_gap", "rollout/logprob_gap")  # no second one if all tokens are stale
    gaps = [row[key] for row in rows for key in keys if key in row]
    print(name, [round(gap, 5) for gap in gaps])  # noqa: T201
    assert max(gaps) < limit
    assert all(row["grad_norm"] > 0 for row in rows)
