"""Classic steps on two ranks give the numbers of one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.classic_models import gpt2, samples, trainer
from tests.e2e.test_ranks import launch
from tests.ranks import leave


def work(out: str) -> None:
    """What each process does: its share of eight samples, three times."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = 8 // world
    found = trainer(
        gpt2(),
        sgd=0.05,
        batch_size=share,
        mini_batch_size=share // 2,
        ppo_epochs=2,
        use_score_scaling=True,
        max_grad_norm=1.0,
        horizon=100.0,
        target=0.5,
    )
    rows = []
    for i in range(3):
        mine = [x[rank * share : (rank + 1) * share] for x in samples(seed=i)]
        stats = found.step(*mine)
        rows.append({k: float(x) for k, x in stats.items() if getattr(x, "ndim", 0) == 0})
    assert found.config.global_batch_size == 8
    if rank == 0:
        total = sum(float(p.detach().double().abs().sum()) for p in found.model.parameters())
        Path(out).write_text(json.dumps([*rows, {"weights": total}]))
    leave()


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", 1, file=__file__)
    two = launch(tmp_path / "two", 2, file=__file__)
    assert len(one) == 4
    for a, b in zip(one, two, strict=True):
        assert set(a) == set(b)
        for name in a:
            if not name.startswith("time/"):
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name


if __name__ == "__main__":
    work(sys.argv[2])
