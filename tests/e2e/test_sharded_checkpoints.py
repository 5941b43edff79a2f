"""Checkpoints of sharded runs: written shard by shard, resumed with any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kedge.checkpoint import checkpoint
from kedge.records.errors import CheckpointError
from tests.e2e.test_ranks import launch
from tests.ranks import leave

STEPS, ROWS = 6, 4
SHARDED = {"ACCELERATE_USE_FSDP": "true"}


def work(folder: str, out: str) -> None:
    """What each rank does: train to STOP, from the newest checkpoint if RESUME is set."""
    from tests.e2e.test_resume import StopAt, trainer

    made = trainer(
        Path(folder),
        StopAt(int(os.environ["STOP"])),
        per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
        num_mini_batches=1,
        adam_epsilon=1e-3,  # Adam would blow rounding up to the size of the learning rate
    )
    if os.environ.get("CRASH"):
        _fail_while_writing_shards(at=2)
    try:
        made.train(resume_from_checkpoint=bool(os.environ.get("RESUME")))
    except CheckpointError as error:
        rows: Any = [str(error)]
    else:
        keys = ("objective/kl", "objective/scores", "loss/policy_avg", "grad_norm")
        rows = [{k: row[k] for k in keys} for row in made.state.log_history if "grad_norm" in row]
    made.save_model(out + "-model")
    leave(rows, out)


def _fail_while_writing_shards(*, at: int) -> None:
    """Rank 1's disk is full at its shards of the given checkpoint."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    write, calls = HuggingFaceStorageWriter.write_data, []

    def failing(self: Any, plan: Any, planner: Any) -> Any:
        calls.append(0)
        if len(calls) == at and os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return write(self, plan, planner)

    HuggingFaceStorageWriter.write_data = failing  # type: ignore[method-assign]


def run(folder: Path, name: str, world: int, *, stop: int = STEPS, **env: str) -> Any:
    """The rows that a run in ``folder`` logged, and its final policy."""
    made = folder / name
    rows = launch(made, world, file=__file__, STOP=str(stop), **env)
    return rows, load_file(made / "rows.json-model" / "model.safetensors")


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    for name, x in a.items():
        torch.testing.assert_close(x, b[name], atol=2e-5, rtol=1e-3, msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return run(folder, "whole", 1)


@pytest.fixture(scope="module")
def half(folder: Path) -> Path:
    """A sharded run of two ranks that stopped half way."""
    run(folder, "half", 2, stop=STEPS // 2, **SHARDED)
    return folder / "half"


def _resumed(folder: Path, half: Path, name: str, world: int, **env: str) -> Any:
    shutil.copytree(half / "run", folder / name / "run")
    return run(folder, name, world, RESUME="1", **env)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_sharded_checkpoint_resumes_with_any_number_of_ranks(
    folder: Path, half: Path, whole: Any, world: int
) -> None:
    rows, policy = _resumed(folder, half, f"resumed-{world}", world, **SHARDED)
    assert rows[-1] == pytest.approx(whole[0][-1], rel=1e-3, abs=1e-5)
    close(policy, whole[1])


@pytest.mark.slow
def test_a_whole_checkpoint_resumes_sharded(folder: Path, whole: Any) -> None:
    run(folder, "whole-half", 1, stop=STEPS // 2)
    rows, policy = _resumed(folder, folder / "whole-half", "cut", 2, **SHARDED)
    assert rows[-1] == pytest.approx(whole[0][-1], rel=1e-3, abs=1e-5)
    close(policy, whole[1])


@pytest.mark.slow
def test_each_rank_writes_its_half_and_weights_are_stored_once(half: Path) -> None:
    saved = half / "run" / f"checkpoint-{STEPS // 2}"
    checkpoint.verify(saved)
    files = sorted((saved / "shards").iterdir())
    assert len(files) == 2
    names, sizes = set(), []
    for file in files:
        with safe_open(str(file), "pt") as f:
            names |= set(f.keys())
            sizes.append(sum(f.get_slice(n).get_shape()[0] for n in f.keys()))  # noqa: SIM118
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    head = json.loads((saved / "state.json").read_text())
    large = {n for n, x in head["shards"].items() if torch.Size(x["shape"]).numel() >= 1024}
    assert {n for n in large & names if "/weights/" in n} == set()  # they are in model files
    assert {n for n in large if "/optimizer/" in n} <= names
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"shards/.* has changed since it was written"):
        checkpoint.verify(saved)


@pytest.mark.slow
def test_a_rank_that_cannot_write_leaves_the_older_checkpoint(folder: Path) -> None:
    rows, _ = run(folder, "full-disk", 2, CRASH="1", **SHARDED)
    assert "No space left on device" in rows[0]
    assert "rank 1" in rows[0] or "checkpoint-3" in rows[0]
    output = folder / "full-disk" / "run"
    assert [x.name for x in checkpoint.checkpoints(output)] == ["checkpoint-3"]
    assert checkpoint.load_latest(output) == output / "checkpoint-3"
    assert not list(output.glob(".saving-*"))


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
