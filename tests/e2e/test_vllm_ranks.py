"""Two ranks with a vLLM each give the numbers of one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.contract.engines import needs_vllm
from tests.e2e.test_ranks import launch
from tests.ranks import leave

pytestmark = needs_vllm
ROWS, UPDATES = 16, 3


def work(folder: str, out: str) -> None:
    """What each process does."""
    from tests.e2e.test_vllm import trainer

    shared = Path(os.environ["KEDGE_SHARED"])
    made = trainer(
        shared,
        folder,
        updates=UPDATES,
        per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
        vllm_engine_args={"kv_cache_memory_bytes": 2**26},
        adam_epsilon=1e-3,  # Adam would blow rounding up to the size of the learning rate
        max_lag=int(os.environ.get("MAX_LAG", "0")),
        rollout_schedule=os.environ.get("SCHEDULE", "in_order"),
    )
    made.train()
    assert made.engine.rollout_engine.service.version() >= UPDATES - 1 - made.args.max_lag
    made.engine.rollout_engine.close()  # leaves the learner's process group
    keys = ("objective/kl", "objective/scores", "loss/policy_avg", "loss/value_avg", "grad_norm")
    rows = [{k: row[k] for k in keys} for row in made.state.log_history if "grad_norm" in row]
    leave(rows, out)


@pytest.mark.slow
def test_two_ranks_with_a_vllm_each_give_the_numbers_of_one(shared: Path, tmp_path: Path) -> None:
    about = {"file": __file__, "KEDGE_SHARED": str(shared), "MAX_LAG": "1"}
    one = launch(tmp_path / "one", 1, **about)
    two = launch(tmp_path / "two", 2, **about)
    assert len(one) == UPDATES
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    completed = launch(tmp_path / "as completed", 2, **about, SCHEDULE="as_completed")
    assert len(completed) == UPDATES


if __name__ == "__main__":
    work(*sys.argv[1:])
