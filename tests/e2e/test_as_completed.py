"""Pieces as completed, through the public trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from kedge import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, remax
from kedge.errors import ConfigError
from kedge.testing import ScriptedRollouts

from .small import rows, small
from .test_groups import make

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
            {"rollout_schedule": "in_order", "in_flight_weight_updates": True},
            "needs rollout_schedule=.as_completed.",
        ),
        ({"rollout_schedule": "random"}, "rollout_schedule='random'"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small(**(OPTIONS | changes))


def test_weights_in_flight_bound_the_age_of_every_trained_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = small(
        output_dir=str(tmp_path),
        in_flight_weight_updates=True,
        response_length=24,
        stop_token=None,
        **(OPTIONS | {"max_lag": 1}),
    )
    assert "max_lag=1: tokens older than 1 iterations do not train" in caplog.text
    trainer.train()
    logged = rows(trainer)
    assert [row["episode"] for row in logged] == [4, 8, 12, 16, 20, 24]
    assert all(row["rollout/lag_max"] <= 1 for row in logged)
    assert all(0 <= row["rollout/too_old_tokens"] < 1 for row in logged)
    shares = [
        [x for name, x in row.items() if name.startswith("rollout/token_lag/")] for row in logged
    ]
    assert all(sum(share) == pytest.approx(1) for share in shares if share)


@pytest.mark.parametrize("kind", ["dynamic sampling", "greedy baselines"])
@pytest.mark.parametrize("in_flight", [False, True])
def test_groups_that_depend_on_scores_complete_one_by_one(
    kind: str, in_flight: bool, tmp_path: Path
) -> None:
    options = OPTIONS | {
        "output_dir": str(tmp_path),
        "in_flight_weight_updates": in_flight,
        "total_episodes": 48,
        "reward_funcs": lambda completions, **_: [len(c.split()) // 4 for c in completions],
    }
    if kind == "dynamic sampling":
        trainer = make(GRPOTrainer, GRPOConfig, dynamic_sampling=2, num_generations=2, **options)
    else:
        options |= {"top_k": 8, "algorithm": remax()}
        options["num_generations"] = 2
        trainer = make(RLOOTrainer, RLOOConfig, **options)
    assert trainer.engine.rollout_engine.slots > 0
    trainer.train()
    logged = rows(trainer)
    assert len(logged) == 6
    assert all(row["rollout/lag_max" if in_flight else "rollout/lag"] <= 2 for row in logged)
    if kind == "dynamic sampling":
        assert sum(row["rollout/resampled_groups"] for row in logged) > 0


def test_an_engine_without_slots_cannot_get_weights_in_flight() -> None:
    with pytest.raises(ConfigError, match="in_flight_weight_updates=True needs a rollout engine"):
        small(
            rollout_engine=ScriptedRollouts([]),
            in_flight_weight_updates=True,
            **(OPTIONS | {"sampler_correction": "off"}),
        )
