"""The cost model of the benchmark: operations counted by hand, and the bound by bytes."""

from __future__ import annotations

from benchmarks.cost_model import Job, operations

from kedge.cli.tools.plan import ModelDims

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
