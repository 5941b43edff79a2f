"""Steps of ``kedge.classic`` on two ranks: the numbers of one."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kedge.ext.trl.classic import PPOTrainer
from kedge.records.errors import ConfigError
from tests.classic_models import gpt2, samples, trainer
from tests.e2e.test_ranks import launch
from tests.ranks import leave


class Own(PPOTrainer):
    """Advantages that are not whitened: over the rows of one process that would be another mean."""

    gathered = 0

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> Any:
        returns = (rewards * mask).flip(1).cumsum(1).flip(1) * mask
        return values * mask, (returns - values) * mask, returns

    def gather_stats(self, stats: Any) -> Any:
        self.gathered += 1
        return super().gather_stats(stats)


def step_in_each_way(folder: str, out: str) -> None:
    """What each process does: its share of eight samples, three times, by each way of a step."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = 8 // world
    rows = []
    for kind in (PPOTrainer, Own):
        found = trainer(
            gpt2(),
            **{"kind": kind, "sgd": 0.05, "batch_size": share},
            **{"mini_batch_size": share // 2 if kind is PPOTrainer else share, "ppo_epochs": 2},
            **{"use_score_scaling": True, "max_grad_norm": 1.0, "horizon": 100.0, "target": 0.5},
        )
        for i in range(3):
            mine = [x[rank * share : (rank + 1) * share] for x in samples(seed=i)]
            stats = found.step(*mine)
            rows.append({k: float(x) for k, x in stats.items() if getattr(x, "ndim", 0) == 0})
        total = sum(float(p.detach().double().abs().sum()) for p in found.model.parameters())
        rows.append({"weights": total, "objective/kl_coef": found.kl_ctl.value})
        if rank == 0:  # alone
            found.save_pretrained(Path(out).parent / kind.__name__)
    assert found.config.global_batch_size == 8
    assert found.gathered == 3 * (world > 1)
    with (
        pytest.raises(ConfigError, match="Skipping overrides train_minibatch")
        if world > 1
        else (nullcontext())
    ):
        trainer(gpt2(), kind=type("Skipping", (PPOTrainer,), {"train_minibatch": len}))
    leave(rows, out)


# Statistics of an overridden step are means over processes, as in TRL, and not over all rows.
MEANS = ("objective/kl", "objective/kl_coef", "objective/entropy", "ppo/mean_scores", "weights")


@pytest.mark.slow
def test_classic_steps_of_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", 1, file=__file__, job=step_in_each_way)
    two = launch(tmp_path / "two", 2, file=__file__, job=step_in_each_way)
    assert len(one) == 8
    for i, (a, b) in enumerate(zip(one, two, strict=True)):
        assert set(a) == set(b)
        for name in a if i < 4 else a.keys() & set(MEANS):
            if not name.startswith("time/"):
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), (i, name)


if __name__ == "__main__":
    step_in_each_way(*sys.argv[1:3])
