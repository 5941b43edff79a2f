"""Every trainer on an accelerator: no mixing of devices, the numbers of a CPU, few waits."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch.utils.backend_registration as backends

from tests import processes
from tests.e2e.strict_runs import CASES

pytestmark = pytest.mark.skipif(
    not hasattr(backends, "_DummyBackendModule"), reason="the strict device needs a newer torch"
)
MAX_WAITS_OF_A_STEP = 8
TOKENS_OF_A_WAIT = 16


@pytest.fixture(scope="module")
def report() -> Any:
    done = processes.run("-m", "tests.e2e.strict_runs", "strict")
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


def test_the_accelerator_counts_waits_and_copies(report: Any) -> None:
    kinds = {"item": 1, "tolist": 1, "boolean index": 1, "to host": 1}
    kinds |= {"to device": 2, "again to device": 1}
    assert report["contract"] == {
        "values": [4.0, 2.0, 2.0, 2, 4.0],
        "waits": {f"{kind} elsewhere": count for kind, count in kinds.items()},
        "total": 4,
    }


@pytest.mark.parametrize("name", CASES)
def test_runs_on_an_accelerator_have_the_numbers_of_a_cpu(report: Any, name: str) -> None:
    cpu, strict = (report["runs"][name][device] for device in ("cpu", "strict"))
    assert len(cpu["rows"]) == len(strict["rows"]) >= 3
    # bf16: operations differ in where they round
    limits = {"rel": 0.3, "abs": 0.1} if "bf16" in name else {"rel": 1e-5, "abs": 1e-6}
    for row, expected in zip(strict["rows"], cpu["rows"], strict=True):
        assert row == pytest.approx(expected, **limits)


@pytest.mark.parametrize(
    "name", [name for name in CASES if "lag 1" not in name]
)  # no second thread
def test_waits_are_bounded(report: Any, name: str) -> None:
    strict = report["runs"][name]["strict"]
    assert len(strict["steps"]) >= 2
    assert max(strict["steps"]) <= MAX_WAITS_OF_A_STEP
    for waits, tokens in strict["chunks"]:
        assert waits <= math.ceil(tokens / TOKENS_OF_A_WAIT)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_copied_to_the_device_twice(report: Any, name: str) -> None:
    assert report["runs"][name]["strict"]["again"] == []
