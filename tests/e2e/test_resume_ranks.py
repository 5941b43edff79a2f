"""Two processes stop, save and go on together."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.ranks import leave, run_ranks


class StopOnOneRank(TrainerCallback):
    """As a user's callback might: it looks at something that rank 1 alone sees."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and not state.is_world_process_zero:
            control.should_training_stop = True


def work(mode: str, folder: str, out: str) -> None:
    """What each process does."""
    from kedge.learner.learner_state import WeightCopier
    from kedge.models.fingerprint import WeightsCopy
    from kedge.records.errors import RewardError, RolloutError, SyncError
    from tests.e2e.test_failures import break_at
    from tests.e2e.test_resume import outcome, trainer

    stops = [StopOnOneRank()] if mode == "first" else []
    made = trainer(
        Path(folder),
        *stops,
        per_device_train_batch_size=2,
        max_lag=1,  # each rank has samples of its own in flight
        save_rollouts=str(Path(folder) / "rec"),
    )
    said = ""
    if mode == "broken" and not made.is_world_process_zero():
        break_at(made, "reward", "score", 5, RewardError("out of order"))
    if mode == "unstaged":
        copies = itertools.count()

        def stage(weights: Any) -> Any:
            if next(copies) == 4 and made.is_world_process_zero():
                raise SyncError("the store is full")
            return WeightsCopy({name: x.clone() for name, x in weights})

        made.engine.learner.copy_weights = WeightCopier(stage=stage)
    try:
        made.train(resume_from_checkpoint=mode == "second")
    except (RewardError, RolloutError, SyncError) as error:
        said = str(error)
    weights, rows = outcome(made)
    found = {"step": made.state.global_step, "rows": rows, "said": said}
    found["weights"] = {k: v.double().sum().item() for k, v in weights.items()}
    rank = os.environ["RANK"]
    Path(f"{out}-{rank}.json").write_text(json.dumps(found))
    leave()


def launch(mode: str, folder: Path) -> list[dict[str, Any]]:
    """Run this file in two processes; what each wrote."""
    out = folder.parent / f"{folder.name}-{mode}"
    run_ranks(2, __file__, mode, folder, out)
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_stop_together_and_go_on_as_if_never_stopped(tmp_path: Path) -> None:
    first = launch("first", tmp_path / "cut")
    assert [f["step"] for f in first] == [3, 3]
    saved = tmp_path / "cut" / "checkpoint-3"
    assert {"rank-00000.json", "rank-00001.json"} <= {p.name for p in saved.iterdir()}
    second = launch("second", tmp_path / "cut")
    whole = launch("whole", tmp_path / "whole")
    assert [f["step"] for f in second] == [6, 6]
    assert second[0]["weights"] == second[1]["weights"]
    assert second[0] == whole[0]
    recorded = sorted(p.name for p in (tmp_path / "cut" / "rec").glob("*.json"))
    assert len(recorded) == 12
    assert recorded[1] == "step-000000-rank-00001.json"
    # Files that only rank 0 writes were written once.
    rows = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [2, 4, 6, 6]  # the last is the summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (
            "broken",
            [
                "sampling or scoring failed on another rank; see the error of that rank",
                "out of order",
            ],
        ),
        ("unstaged", ["the store is full"] * 2),
    ],
)
def test_what_fails_on_one_rank_costs_no_update_on_any(
    tmp_path: Path, mode: str, said: list[str]
) -> None:
    broken = launch(mode, tmp_path / "cut")
    assert [f["said"] for f in broken] == said
    saved = sorted(p.name for p in (tmp_path / "cut").glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-4"]
    second = launch("second", tmp_path / "cut")
    whole = launch("whole", tmp_path / "whole")
    if mode == "broken":  # otherwise it failed before the metrics of iteration 4 were logged
        assert second[0] == whole[0]
    assert [f["weights"] for f in second] == [f["weights"] for f in whole]


if __name__ == "__main__":
    work(*sys.argv[1:])
