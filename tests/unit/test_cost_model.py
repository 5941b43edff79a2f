"""The cost model of the benchmark: operations counted by hand, and the bound by bytes."""

from __future__ import annotations

import pytest
from benchmarks.cost_model import Device, Job, operations, predict

from kedge.cli.planning.memory import Shape

SHAPE = Shape(hidden=8, layers=2, intermediate=32, cache=16, vocab=100)
JOB = Job(body=1000, shape=SHAPE, rows=4, prompt=6, response=10, epochs=2)


def test_operations_by_hand() -> None:
    # 64 tokens; each sees 8 others on average: 2 x 1000 + 4 x 2 x 8 x 8 = 2512 operations.
    forward, head = 64 * 2512, 40 * 2 * 8 * 100
    assert operations(JOB) == {
        "generate": 24 * (2000 + 64 * 3) + 40 * (2000 + 64 * 11) + head,
        "reward": forward,
        "annotate": 2 * forward + head,
        "train": 2 * 3 * (2 * forward + head),
    }


def test_a_step_of_sampling_takes_no_less_than_its_bytes() -> None:
    seconds = predict(JOB, Device(flops=1e15, bandwidth=1e6))
    assert seconds["generate"] == pytest.approx(10 * (1800 + 4 * 2 * 16 * 11) * 4 / 1e6)
    assert (
        predict(JOB, Device(flops=1e6, bandwidth=1e15))["train"] == operations(JOB)["train"] / 1e6
    )
