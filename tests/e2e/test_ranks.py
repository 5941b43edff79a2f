"""A whole run on two ranks, with copied or with sharded weights, gives the numbers of one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import leave, run_ranks

ROWS = 4


def work(folder: str, out: str) -> None:
    """What each process does."""
    from tests.e2e.test_resume import trainer

    made = trainer(
        Path(folder),
        per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
        num_mini_batches=2,
        learning_rate=1e-3,
        adam_epsilon=1e-3,  # Adam would blow rounding up to the size of the learning rate
        logging_steps=1,
        max_lag=int(os.environ.get("MAX_LAG", "0")),
    )
    made.train()
    keys = ("objective/kl", "objective/scores", "loss/policy_avg", "loss/value_avg", "grad_norm")
    keys += ("val/num_eos_tokens", "val/ratio_var", "val/explained_variance", "policy/entropy_avg")
    rows = [{k: row[k] for k in keys} for row in made.state.log_history if "grad_norm" in row]
    leave(rows, out)


def launch(folder: Path, world: int, *, file: str = __file__, **env: str) -> list[dict[str, Any]]:
    """Run a file like this one in ``world`` processes; the rows that the first logged."""
    out = folder / "rows.json"
    folder.mkdir(exist_ok=True, parents=True)
    strict = ("-W", "error::UserWarning:torch")
    run_ranks(world, *strict, file, folder / "run", out, timeout=600, **env)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_two_ranks_copied_or_sharded_give_the_numbers_of_one(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", 1)
    two = launch(tmp_path / "two", 2)
    sharded = launch(tmp_path / "sharded", 2, ACCELERATE_USE_FSDP="true")
    assert len(one) == 6
    assert abs(one[-1]["objective/kl"]) > 1e-3  # the policy moved
    for a, b, c in zip(one, two, sharded, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
        assert c == pytest.approx(a, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_sharded_policy_is_sampled_ahead_from_a_whole_copy(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", 1, MAX_LAG="1")
    sharded = launch(tmp_path / "sharded", 2, ACCELERATE_USE_FSDP="true", MAX_LAG="1")
    assert abs(one[-1]["objective/kl"]) > 1e-3
    for a, b in zip(one, sharded, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
