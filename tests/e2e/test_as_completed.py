"""Pieces as completed, through the public trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from kedge.errors import ConfigError

from .small import rows, small

OPTIONS: dict[str, Any] = {
    "rollout_schedule": "as_completed",
    "max_lag": 2,
    "total_episodes": 24,
    "sampler_correction": "truncate",
}


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= 3


def test_a_run_is_whole_and_never_too_stale(tmp_path: Path) -> None:
    trainer = small(output_dir=str(tmp_path), **OPTIONS)
    trainer.train()
    logged = rows(trainer)
    assert [row["episode"] for row in logged] == [4, 8, 12, 16, 20, 24]
    assert all(0 <= row["rollout/lag"] <= 2 for row in logged)
    assert any(row["rollout/lag"] > 0 for row in logged)
    assert all(row["rollout/correction_weight"] > 0 for row in logged)


def test_it_goes_on_from_a_checkpoint_with_what_was_sampled(tmp_path: Path) -> None:
    first = small(output_dir=str(tmp_path), save_steps=1, save_strategy="steps", **OPTIONS,
                  callbacks=[StopAt()])  # fmt: skip
    first.train()
    assert first.state.global_step == 3
    second = small(output_dir=str(tmp_path), **OPTIONS)
    second.train(resume_from_checkpoint=True)
    assert [row["episode"] for row in rows(second)] == [4, 8, 12, 16, 20, 24]
    assert all(row["rollout/lag"] <= 2 for row in rows(second))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_lag": 0}, "max_lag=0 does not sample during training; set max_lag=1"),
        ({"num_partial_batches": 3}, "must divide the 4 prompts of a rank; valid values: 1, 2, 4"),
        ({"num_partial_batches": 0}, "num_partial_batches=0"),
        (
            {"rollout_schedule": "in_order", "num_partial_batches": 2},
            "leave num_partial_batches out",
        ),
        ({"rollout_schedule": "random"}, "rollout_schedule='random'"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small(**(OPTIONS | changes))
