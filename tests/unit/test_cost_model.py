"""The cost model of the benchmark: operations counted by hand, and the bound by bytes."""

from __future__ import annotations

import pytest
from benchmarks.cost_model import Device, Job, operations, predict

from kedge.cli.tools.memory import ModelDims

SHAPE = ModelDims(hidden=8, layers=2, intermediate=32, cache=16, vocab=100)
JOB = Job(body=1000, shape=SHAPE, rows=4, prompt=6, response=10, epochs=2)


def test_operations_by_hand() -> None:
    # 64 tokens; each sees 8 others on average: 2 x 1000 + 4 x 2 x 8 x 8 = 2512 operations.
    forward, head = 64 * 2512, 40 * 2 * 8 * 100
    sampled = 24 * (2000 + 64 * 3) + 40 * (2000 + 64 * 11)
    backbones = 2 * 2 * forward
    assert operations(JOB) == {
        "generate": {"forward": sampled, "vocabulary": head},
        "reward": {"forward": forward},
        "annotate": {"forward": 2 * forward, "vocabulary": head},
        "train": {
            "forward": backbones,
            "input_gradient": backbones,
            "weight_gradient": backbones,
            "vocabulary": 2 * 3 * head,
        },
    }


def device(flops: float, bandwidth: float) -> Device:
    kinds = ("forward", "input_gradient", "weight_gradient")
    return Device(
        flops=dict.fromkeys(kinds, flops) | {"vocabulary": flops / 2}, bandwidth=bandwidth
    )


def test_a_step_of_sampling_takes_no_less_than_its_bytes() -> None:
    seconds = predict(JOB, device(1e15, 1e6))
    assert seconds["generate"] == pytest.approx(10 * (1800 + 4 * 2 * 16 * 11) * 4 / 1e6)
    kinds = operations(JOB)["train"]
    expected = (sum(kinds.values()) + kinds["vocabulary"]) / 1e6
    assert predict(JOB, device(1e6, 1e15))["train"] == pytest.approx(expected)
