"""What reward functions record belongs to the batch that they scored, at any lag."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kedge.errors import RewardError

from .small import rows, small

CALLS = "log/call"


def counting() -> Any:
    calls = iter(range(1, 100))

    def reward(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_metric("call", next(calls))
        log_extra("words", [len(c.split()) for c in completions])
        return [float(len(c)) for c in completions]

    return reward


@pytest.mark.parametrize("options", [{"max_lag": 0}, {"max_lag": 1}, {"max_lag": 3}])
def test_a_row_of_metrics_has_the_records_of_its_own_batch(
    options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = small(
        reward_model=None, reward_funcs=[counting()], total_episodes=20, preflight=False, **options
    )
    trainer.train()
    assert [row[CALLS] for row in rows(trainer)] == [1, 2, 3, 4, 5]


def test_records_of_groups_that_were_scored_together_are_logged_once(tmp_path: Path) -> None:
    trainer = small(
        reward_model=None, reward_funcs=[counting()], total_episodes=20, preflight=False,
        max_lag=1, rollout_schedule="as_completed",
    )  # fmt: skip
    trainer.train()
    calls = [row[CALLS] for row in rows(trainer) if CALLS in row]  # with the first group taken
    assert calls
    assert all(a < b for a, b in itertools.pairwise(calls))


def test_extra_columns_reach_the_table_and_checkpoints(tmp_path: Path) -> None:
    trainer = small(
        reward_model=None,
        reward_funcs=[counting()],
        output_dir=str(tmp_path),
        num_sample_generations=1,
        max_lag=1,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    tables = list((tmp_path / "completions").glob("*.jsonl"))
    assert tables
    assert all('"words":' in file.read_text().splitlines()[0] for file in tables)


def test_a_column_of_another_length_is_refused() -> None:
    def reward(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("words", [1])
        return [float(len(c)) for c in completions]

    with pytest.raises(
        RewardError,
        match=r"log_extra\('words', ...\) must get one value per completion: got 1 for 4",
    ):
        small(reward_model=None, reward_funcs=[reward]).train()
