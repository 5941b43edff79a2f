"""Evaluation in a run: share solved, pass@k, win rate against the start, the best checkpoint."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kedge.records.errors import CheckpointError, ConfigError
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy
from tests.e2e.small import PROMPTS, VOCAB, small
from tests.e2e.test_ranks import launch
from tests.ranks import leave

EVAL = PROMPTS[:5]  # with batches of two, the last one is filled up


def short(completions: list[str], **_: Any) -> list[float]:
    """1 for a response with an even number of words."""
    return [float(len(c.split()) % 2 == 0) for c in completions]


def trainer(folder: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "total_episodes": 16,
        "per_device_eval_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "reward_model": None,
        "reward_funcs": short,
        "eval_dataset": EVAL,
        "temperature": 1.0,
    }
    return small(**options | changes)


def evaluations(made: Any) -> list[dict[str, Any]]:
    return [row for row in made.state.log_history if "eval_objective/scores" in row]


def tables(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {
        int(file.stem[5:]): [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((folder / "eval_completions").glob("*.jsonl"))
    }


def test_pass_at_k_agrees_with_the_table_of_completions(tmp_path: Path) -> None:
    made = trainer(tmp_path, num_generations_eval=4, eval_success_score=1.0)
    made.train()
    for row in evaluations(made):
        listed = tables(tmp_path)[row["step"]]
        assert len(listed) == 4 * len(EVAL)
        counts = [sum(r["score"] for r in listed[i : i + 4]) for i in range(0, 20, 4)]
        assert all(len({r["query"] for r in listed[i : i + 4]}) == 1 for i in range(0, 20, 4))
        assert row["eval_accuracy"] == pytest.approx(sum(counts) / 20)
        assert row["eval_accuracy"] == pytest.approx(row["eval_objective/scores"])
        assert row["eval_pass@4"] == pytest.approx(sum(c > 0 for c in counts) / 5)
        assert row["eval_accuracy"] <= row["eval_pass@2"] <= row["eval_pass@4"]
    assert len({r["model response"] for r in listed[:4]}) > 1  # sampled, not greedy


def test_win_rate_against_the_start_survives_a_resume(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", eval_against_start=True, num_generations_eval=2)
    whole.train()
    rows = evaluations(whole)
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows[0]["eval_win_rate"] == 0.5  # against itself
    said = tables(tmp_path / "whole")
    for row in rows[1:]:
        pairs = zip(said[row["step"]], said[0], strict=True)
        wins = [(a["score"] > b["score"]) + 0.5 * (a["score"] == b["score"]) for a, b in pairs]
        assert row["eval_win_rate"] == pytest.approx(sum(wins) / len(wins))

    options = {"eval_against_start": True, "num_generations_eval": 2, "save_strategy": "steps"}
    trainer(tmp_path / "cut", **options, save_steps=2, max_steps=4).train()
    again = trainer(tmp_path / "cut", **options, save_steps=2, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert evaluations(again)[-1]["eval_win_rate"] == rows[-1]["eval_win_rate"]

    other = trainer(
        tmp_path / "cut", **options, save_steps=2, max_steps=4, eval_dataset=PROMPTS[:3]
    )
    with pytest.raises(CheckpointError, match="scored on 10 rows of 'eval', got 6 now"):
        other.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))


def test_the_best_by_win_rate_is_kept_and_loaded(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        **{"total_episodes": 24, "eval_against_start": True, "eval_steps": 1},
        **{"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1},
        **{"load_best_model_at_end": True, "metric_for_best_model": "eval_win_rate"},
        **{"greater_is_better": True, "num_generations_eval": 4},
    )
    made.train()
    rates = {row["step"]: row["eval_win_rate"] for row in evaluations(made) if row["step"]}
    best = max(rates, key=lambda step: (rates[step], -step))
    assert made.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert (tmp_path / f"checkpoint-{best}").is_dir()
    after = made.evaluate()
    assert after["eval_win_rate"] == rates[best]  # the same weights, the same draws


def test_tables_have_a_column_for_every_source(tmp_path: Path) -> None:
    def none(completions: list[str], **_: Any) -> list[float | None]:
        return [None if i % 2 else 2.0 for i in range(len(completions))]

    trainer(tmp_path, reward_funcs=[short, none], max_steps=2).train()
    for row in tables(tmp_path)[2]:
        assert row["score"] == row["short"] + (row["none"] or 0.0)


# -- the user's own metrics ------------------------------------------------------------------------


def count(prompts: list[str], completions: list[str], scores: list[Any], at: list[int]) -> Any:
    """Numbers that show which rows came, in which order and how often it was called."""
    count.calls = getattr(count, "calls", 0) + 1  # type: ignore[attr-defined]
    return {
        "rows": len(prompts),
        "ordered": at == [i for i in range(len(EVAL)) for _ in range(len(at) // len(EVAL))],
        "solved": sum(scores) / len(scores),
        "words": sum(len(c.split()) for c in completions),
        "falling": -count.calls,  # type: ignore[attr-defined]
    }


COUNTED = [{**row, "at": i} for i, row in enumerate(EVAL)]


def test_the_users_metrics_choose_the_best_model(tmp_path: Path) -> None:
    """They see every row once, in order; the best model is the first by one that falls."""
    count.calls = 0  # type: ignore[attr-defined]
    made = trainer(
        tmp_path,
        compute_metrics=count,
        **{"eval_dataset": COUNTED, "num_generations_eval": 2, "eval_success_score": 1.0},
        **{"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
        **{"load_best_model_at_end": True, "metric_for_best_model": "falling"},
    )
    made.train()
    found = evaluations(made)
    assert [row["eval_falling"] for row in found] == [-1, -2]
    for row in found:
        said = [r["model response"].split() for r in tables(tmp_path)[row["step"]]]
        words = sum(word.startswith("w") for response in said for word in response)
        assert (row["eval_rows"], row["eval_ordered"], row["eval_words"]) == (10, 1, words)
        assert row["eval_solved"] == row["eval_accuracy"] == row["eval_objective/scores"]
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert made.evaluate(COUNTED[:3])["eval_rows"] == 6


def test_metrics_that_fail_lose_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kedge"), "propagate", True)

    def broken(scores: list[float | None], **_: Any) -> Any:
        return scores if made.state.global_step == 2 else {"mine": 1 / len(scores[10:])}

    made = trainer(tmp_path, compute_metrics=broken, metric_for_best_model="mine")
    made.train()
    assert [row["step"] for row in evaluations(made)] == [2, 4]
    assert "compute_metrics function broken failed" in caplog.text
    assert "'list' object has no attribute 'items'" in caplog.text
    assert "division by zero" in caplog.text
    needs = lambda prompts, difficulty: {}  # noqa: E731
    with pytest.raises(ConfigError, match="compute_metrics function lambda needs difficulty, and"):
        trainer(tmp_path, compute_metrics=needs)


# -- while the sampler works ahead ---------------------------------------------------------------


class Watched(EmbeddedEngine):
    """A slow engine that one thread at a time may use."""

    def __init__(self) -> None:
        super().__init__(tiny_policy("gpt_neox", vocab_size=VOCAB), pad_id=0, shares_weights=False)
        self._busy = threading.Lock()
        self.evaluated: list[int] = []

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        assert self._busy.acquire(blocking=False), "two threads sample at the same time"
        try:
            time.sleep(0.03)
            found = super().generate(*args, **kwargs)
        finally:
            self._busy.release()
        if kwargs["sampling"].temperature < 0.1:
            self.evaluated.append(int(found.policy_version[0]))
        return found

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        assert self._busy.acquire(blocking=False), "weights are loaded while another thread samples"
        try:
            return super().load_weights(*args, **kwargs)
        finally:
            self._busy.release()


@pytest.mark.parametrize("schedule", ["in_order", "as_completed"])
def test_an_evaluation_is_of_the_newest_weights(schedule: str) -> None:
    engine = Watched()
    made = small(
        **{"rollout_engine": engine, "max_lag": 1, "rollout_schedule": schedule},
        **{"total_episodes": 20, "eval_dataset": PROMPTS[:4], "eval_strategy": "steps"},
        eval_steps=1,
    )
    made.train()
    assert engine.evaluated == [1, 2, 3, 4, 5]


def work(folder: str, out: str) -> None:
    """What each process does."""
    world = int(os.environ["WORLD_SIZE"])
    made = trainer(
        Path(folder),
        per_device_train_batch_size=4 // world,
        per_device_eval_batch_size=4 // world,  # two batches of four for five prompts
        **{"eval_against_start": True, "eval_success_score": 1.0, "num_generations_eval": 4},
        **{"adam_epsilon": 1e-3, "save_strategy": "steps", "save_steps": 2},
        **{"load_best_model_at_end": True, "metric_for_best_model": "eval_win_rate"},
        greater_is_better=True,
        **{"compute_metrics": count, "eval_dataset": COUNTED},
    )
    made.train()
    assert getattr(count, "calls", 0) == (3 if made.is_world_process_zero() else 0)
    names = (
        "step",
        "eval_rows",
        "eval_ordered",
        "eval_falling",
        "eval_words",
        "eval_accuracy",
        "eval_pass@2",
        "eval_pass@4",
        "eval_win_rate",
    )
    rows = [{name: row[name] for name in names} for row in evaluations(made)]
    rows.append({"best": made.state.best_global_step})
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(rows))
    leave(rows, out)


@pytest.mark.slow
def test_ranks_agree_with_one_another_and_with_one(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", 1, file=__file__)
    two = launch(tmp_path / "two", 2, file=__file__)
    assert len(one) == 4
    assert [row["eval_rows"] for row in one[:3]] == [20, 20, 20]
    assert all(row["eval_ordered"] for row in one[:3])
    assert two == [pytest.approx(row) for row in one]
    ranks = [(tmp_path / "two" / f"rows.json.{rank}").read_text() for rank in range(2)]
    assert ranks[0] == ranks[1]


if __name__ == "__main__":
    work(*sys.argv[1:])
