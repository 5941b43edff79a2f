"""Two learners share three engines: what each trains on, as completed and in flight."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small import PROMPTS, small
from tests.e2e.test_ranks import launch
from tests.ranks import leave

STEPS, ROWS = 10, 4


def work(folder: str, out: str) -> None:
    """What each process does."""
    from tests.on_ray.jobs import AsDone

    options = {
        "output_dir": folder,
        "total_episodes": 2 * ROWS * STEPS,
        "num_ppo_epochs": 1,
        "max_lag": 2,
        "response_length": 16,
        "in_flight_weight_updates": os.environ["IN_FLIGHT"] == "1",
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "eval_dataset": PROMPTS[:4],
    }
    first = AsDone(options, engine="here", end=os.environ["END"])()
    rows, *second = AsDone(options, engine="here", resume=True)()
    if os.environ["RANK"] == "0":
        # Without what came after the checkpoint that it resumed from.
        pairs = zip(first[1], second[0], strict=True)
        trained = [a[: STEPS - len(b)] + b for a, b in pairs]
        scored = [a["scored"] + b["scored"] for a, b in zip(first[2], second[1], strict=True)]
        Path(out).write_text(json.dumps([[rows, trained, scored]]))
    leave()


def check(rows: list[dict[str, Any]], trained: list[Any], scored: list[int]) -> None:
    """Every prompt was trained on once, within the bound, and the ranks had equal shares."""
    assert [row["episode"] for row in rows] == [2 * ROWS * n for n in range(1, STEPS + 1)]
    ages = {age for rank in trained for x in rank for age in x[4]}
    assert {0} < ages <= {0, 1, 2}
    source = small(per_device_train_batch_size=2 * ROWS).engine.source
    want = [
        " ".join(map(str, b.ids[i][b.mask[i]].tolist()))
        for b in map(source.batch, range(STEPS))
        for i in range(2 * ROWS)
    ]
    got = [text for rank in trained for prompts, *_ in rank for text in prompts]
    assert sorted(got) == sorted(want)
    texts = {x for rank in trained for a, b, *_ in rank for x in zip(a, b, strict=True)}
    assert len(texts) == 13  # columns follow their prompts
    for rank, iterations in enumerate(trained):
        assert [x[2] for x in iterations] == [list(range(rank * ROWS, (rank + 1) * ROWS))] * STEPS
    totals = [sum(x[3] for x in iterations) for iterations in trained]
    assert max(totals) <= 1.1 * min(totals)
    assert sum(scored) >= 2 * ROWS * STEPS
    assert min(scored) > 0.2 * sum(scored)  # each rank scores


@pytest.mark.slow
@pytest.mark.parametrize(("in_flight", "end"), [("0", "reward"), ("1", "stop")])
def test_two_learners_share_three_engines(tmp_path: Path, in_flight: str, end: str) -> None:
    """They evaluate between iterations, end in the middle of the run and resume."""
    (found,) = launch(tmp_path, 2, file=__file__, IN_FLIGHT=in_flight, END=end)
    check(*found)


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
