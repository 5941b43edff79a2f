"""Rotation, ranks and settings of checkpoints, and kills while one is written."""

import json
import subprocess
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch

from kedge.checkpoint import checkpoint
from kedge.errors import CheckpointError
from tests import processes
from tests.unit.checkpoint_state import steps


@pytest.mark.parametrize(
    ("steps_saved", "limit", "keep", "left"),
    [
        ((1, 2, 9, 10, 11), 3, ["checkpoint-1", None], [1, 10, 11]),  # by number; the best stays
        ((1, 2, 9, 10, 11), 1, [Path("x/checkpoint-1")], [1, 11]),
        # resumed from 2, while 4 and 6 of the first run are still there
        ((4, 6, 3), 2, ["checkpoint-3"], [3, 6]),
        *(((1, 2, 3), limit, [], [1, 2, 3]) for limit in (None, 0, 3, 4)),
    ],
)
def test_rotation(tmp_path, steps_saved, limit, keep, left):
    for step in steps_saved:
        checkpoint.save(tmp_path, step, {"a": step})
    gone = checkpoint.rotate(tmp_path, limit, keep=keep)
    assert steps(tmp_path) == left
    assert {checkpoint.parse_step(p) for p in gone} == {*steps_saved} - {*left}


def test_rotation_leaves_the_newest_whole_one_and_other_folders(tmp_path):
    for name in ("checkpoint-best", "checkpoint-1x", "runs"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"a": step})
    (tmp_path / "checkpoint-3" / "state.json").write_text("{}")
    checkpoint.rotate(tmp_path, 1)
    checkpoint.tidy(tmp_path)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"checkpoint-best", "checkpoint-1x", "runs", "checkpoint-2"}


# ------------------------------------------------------------------- ranks and settings


def test_each_rank_gets_its_own_state_back(tmp_path):
    gate = threading.Barrier(2)

    def write(rank: int) -> None:
        shared = {"kl": {"value": 0.5}} if rank == 0 else {}
        local = {"in_flight": [torch.full((2,), float(rank))], "rank": rank}
        checkpoint.save(
            tmp_path, 3, shared, local=local, rank=rank, world_size=2, barrier=gate.wait
        )

    other = threading.Thread(target=write, args=(1,))
    other.start()
    write(0)
    other.join()
    for rank in (0, 1):
        read = checkpoint.load(tmp_path / "checkpoint-3", rank=rank, world_size=2)
        assert read.parts == {"kl": {"value": 0.5}}
        assert read.local["rank"] == rank
        assert read.local["in_flight"][0].tolist() == [rank, rank]
    with pytest.raises(CheckpointError, match="per-rank state of 2 processes, this run has 1"):
        checkpoint.load(tmp_path / "checkpoint-3")


def test_another_number_of_ranks_warns_when_no_rank_has_state_of_its_own(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"a": 1})
    with pytest.warns(UserWarning, match="written by 1 processes, this run has 4"):
        checkpoint.load(folder, world_size=4)


def test_differing_settings_are_listed(tmp_path):
    saved = {"learning_rate": 3e-6, "seed": 1, "betas": (0.9, 0.99), "gone": None}
    saved["kl"] = {"coef": 0.05, "target": 6}
    folder = checkpoint.save(tmp_path, 1, {"a": 1}, settings=saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(folder, settings=saved)
    now = {"learning_rate": 1e-5, "seed": 1, "betas": (0.9, 0.99), "new": True}
    now["kl"] = {"coef": 0.1, "target": 6}
    with pytest.warns(UserWarning, match="other settings") as caught:
        checkpoint.load(folder, settings=now)
    text = str(caught[0].message)
    assert "learning_rate: 3e-06 in the checkpoint, 1e-05 now" in text
    assert "gone: null in the checkpoint, absent now" in text
    assert "kl.coef: 0.05 in the checkpoint, 0.1 now" in text
    assert "seed" not in text
    assert "target" not in text


# ------------------------------------------------------------------------------ kills

KILLS = """
    import json, os, shutil, signal, sys
    from pathlib import Path
    import torch
    from kedge.checkpoint import checkpoint
    from kedge.checkpoint import serialization as tree

    root = Path(sys.argv[1])
    state = lambda step: {"m": {"a": {"w": torch.full((300,), float(step))}}, "n": step}

    def arm(n):
        left = [n]
        def dying(f):
            def call(*a, **k):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return f(*a, **k)
            return call
        for owner, name in [(os, "mkdir"), (os, "rename"), (os, "fsync"), (os, "unlink"),
                            (os, "rmdir"), (Path, "write_text"), (tree, "save_file")]:
            setattr(owner, name, dying(getattr(owner, name)))
        half = checkpoint.zlib.crc32
        checkpoint.zlib = type("Z", (), {"crc32": staticmethod(dying(half))})

    def in_child(job):
        pid = os.fork()
        if pid == 0:
            job()
            os._exit(0)
        return os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL

    def save(n, step, redo):
        arm(n)
        checkpoint.save(root, step, state(step + redo))
        checkpoint.rotate(root, 2, keep=[root / f"checkpoint-{step}"])

    report = []
    for redo in (0, 100):  # a new step; the same step once more
        for n in range(200):
            shutil.rmtree(root, ignore_errors=True)
            for step in (1, 2, 3) if redo else (1, 2):
                checkpoint.save(root, step, state(step))
            killed = in_child(lambda: save(n, 3, redo))
            before = sorted(p.name for p in root.iterdir())
            checkpoint.tidy(root)
            for folder in checkpoint.checkpoints(root):
                checkpoint.verify(folder)
            good = checkpoint.load_latest(root)
            read = checkpoint.load(good)
            w = read.parts["m"]["a"]["w"]
            report.append({
                "redo": redo, "killed": killed, "step": read.step, "n": read.parts["n"],
                "whole": bool((w == read.parts["n"]).all()),
                "left": sorted(p.name for p in root.iterdir()), "before": before,
            })
            if not killed:
                break
    print(json.dumps(report))
"""


def run(code: str, *args: object) -> "subprocess.CompletedProcess[str]":
    done = processes.run("-c", textwrap.dedent(code), *map(str, args))
    assert done.returncode == 0, done.stderr
    return done


def test_a_kill_at_any_call_leaves_a_whole_checkpoint(tmp_path):
    report = json.loads(run(KILLS, tmp_path / "run").stdout.splitlines()[-1])
    for redo in (0, 100):
        rows = [r for r in report if r["redo"] == redo]
        assert len(rows) >= 15  # the instrument does fire, at every call
        assert [r["killed"] for r in rows] == [True] * (len(rows) - 1) + [False]
        assert all(r["whole"] for r in rows)
        assert all(name.startswith("checkpoint-") for r in rows for name in r["left"])
        assert any(name.startswith(".") for r in rows for name in r["before"])
        assert rows[-1]["left"] == ["checkpoint-2", "checkpoint-3"]
    new = [r["step"] for r in report if r["redo"] == 0]
    assert set(new) == {2, 3}
    assert new == sorted(new)  # once the new one is visible, it stays
    again = [r["n"] for r in report if r["redo"] == 100]
    assert set(again) == {3, 103}
    assert again == sorted(again)
