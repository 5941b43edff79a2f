"""A disk that refuses ends a run for checkpoints and models alone, and breaks nothing."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from kedge.checkpoint import checkpoint
from kedge.records.errors import CheckpointError, ConfigError
from kedge.reporting.base import JsonlTracker

from .small import PROMPTS, rows, small
from .test_resume import assert_same, trainer, whole_run

FULL = Path("/dev/full")  # every write to it fails with ENOSPC
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")


NO_ROOM: set[Path] = set()  # files that are opened as /dev/full


@pytest.fixture(autouse=True)
def _no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened = Path.open

    def open_full(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if self in NO_ROOM:
            return opened(FULL, "w", **options)
        return opened(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_full)
    yield
    NO_ROOM.clear()


def full(file: Path) -> None:
    """Whatever is written to this file finds no room."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".part":
        NO_ROOM.add(file)
        return
    file.unlink(missing_ok=True)
    file.symlink_to(FULL)


class At(TrainerCallback):
    """Does something once an update is done."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.do()


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """As on a disk with little room: writing more than ``size`` bytes to a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def logged(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_rows_wait_until_there_is_room(tmp_path: Path) -> None:
    tracker, file = JsonlTracker(tmp_path), tmp_path / "metrics.jsonl"
    tracker.log({"n": 1.0}, step=1)
    with no_file_above(file.stat().st_size + 7):  # part of the next row would fit
        for step in (2, 3):
            with pytest.raises(OSError, match="too large"):
                tracker.log({"n": float(step)}, step=step)
    assert logged(file) == [1]
    tracker.log({"n": 4.0}, step=4)
    assert logged(file) == [1, 2, 3, 4]


def test_a_table_is_whole_or_as_before(tmp_path: Path) -> None:
    tracker, file = JsonlTracker(tmp_path), tmp_path / "completions" / "step-000001.jsonl"
    tracker.table("completions", [{"query": "q"}], step=1)
    full(file.with_suffix(".part"))
    with pytest.raises(OSError, match="No space left"):
        tracker.table("completions", [{"query": "other"}], step=1)
    assert json.loads(file.read_text()) == {"query": "q"}
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.usefixtures("curves")
def test_files_beside_a_run_are_missed_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, rec = tmp_path / "out", tmp_path / "rec"
    made = small(
        **{"output_dir": str(out), "total_episodes": 12, "eval_dataset": PROMPTS[:4]},
        **{"eval_strategy": "steps", "eval_steps": 1, "eval_against_start": True},
        **{"log_token_rows": 2, "save_rollouts": str(rec)},
    )
    for step in (1, 2, 3):
        full(out / "eval_completions" / f"step-{step:06d}.part")
        full(out / "tokens" / f"step-{step:06d}.part")
        full(rec / f"step-{step - 1:06d}.part")
    full(out / "curves.png")
    made.train()
    assert len(rows(made)) == 3
    assert [row["step"] for row in made.state.log_history if "eval_win_rate" in row] == [0, 1, 2, 3]
    said = [line for line in caplog.messages if line.startswith("cannot write ")]
    kinds = ["recorded rollouts", "token logs", "the table eval_completions", "curves"]
    assert sorted(
        line.removeprefix("cannot write ").partition(" to ")[0] for line in said
    ) == sorted(kinds)
    assert all("No space left" in line and "make room on that disk" in line for line in said)
    assert logged(out / "metrics.jsonl")[-1] == 3
    assert [p for p in rec.iterdir() if p.suffix != ".part"] == []


def test_rows_that_found_no_room_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small(output_dir=str(tmp_path), total_episodes=12)
    file = tmp_path / "metrics.jsonl"
    made.add_callback(At(2, lambda: full(file)))
    made.train()
    assert "cannot write metrics to" in caplog.text
    assert len(rows(made)) == 3


def test_a_checkpoint_that_finds_no_room_leaves_the_one_before(tmp_path: Path) -> None:
    made = trainer(tmp_path, save_steps=2)
    made.add_callback(
        At(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY)))
    )
    with pytest.raises(CheckpointError) as raised, no_file_above(resource.RLIM_INFINITY):
        made.train()
    said = str(raised.value)
    assert f"could not write {tmp_path / 'checkpoint-4'}" in said
    assert "too large" in said
    assert "make room on that disk; resume_from_checkpoint=True continues from checkpoint-2" in said
    assert sorted(p.name for p in tmp_path.glob("*checkpoint*")) == ["checkpoint-2"]
    checkpoint.verify(tmp_path / "checkpoint-2")
    second = trainer(tmp_path, save_steps=2)
    second.train(resume_from_checkpoint=True)
    assert_same(second, whole_run())


def test_models_that_find_no_room_are_named(tmp_path: Path) -> None:
    made = small(output_dir=str(tmp_path))
    for size in (100, 2000, 5000):  # of a configuration, a tokenizer, weights
        with (
            no_file_above(size),
            pytest.raises(CheckpointError, match="make room on that disk, or pass"),
        ):
            made.save_model(str(tmp_path / str(size)))


@pytest.mark.skipif(os.getuid() == 0, reason="this user may write anywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"must be writable .*Permission denied.*set another"):
        small(output_dir=str(tmp_path / "run"))


def test_a_full_disk_at_the_start_is_an_error(tmp_path: Path) -> None:
    full(tmp_path / "run.part")
    with pytest.raises(ConfigError, match=r"No space left.*nothing was trained yet: make room"):
        small(output_dir=str(tmp_path)).train()
