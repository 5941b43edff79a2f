"""Checkpoints come back bit for bit, survive kills, and name their own damage."""

import json
import math
import struct
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from enum import Enum
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kedge.engine.checkpoint import checkpoint
from kedge.engine.checkpoint.folders import write_manifest
from kedge.engine.checkpoint.serialization import join, split
from kedge.errors import CheckpointError


def state(step: int = 0) -> dict:
    g = torch.Generator().manual_seed(step)
    weight = torch.randn(5, 3, generator=g)
    return {
        "learner": {
            "model": {"w": weight, "tied": weight, "half": weight.bfloat16(), "empty": {}},
            "optimizer": {
                "state": {0: {"exp_avg": torch.randn(5, generator=g), "step": torch.tensor(3.0)}},
                "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.999), "params": [0]}],
            },
        },
        "kl": {"value": 0.1 + 0.2, "history": [], "big": 2**80, "nan": math.nan, "inf": -math.inf},
        "flags": [True, None, "text \u2603", {1: "int", "1": "str", (None): 2, 2.5: False}],
        "rng": torch.arange(8, dtype=torch.uint8),
        "ids": torch.tensor([[2**62, -1]]),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 4),
    }


def same(a: object, b: object) -> bool:
    """Equal in value, type, key types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


def test_round_trip_is_bit_exact(tmp_path):
    folder = checkpoint.save(tmp_path, 12, state(), settings={"lr": 3e-4})
    assert folder == tmp_path / "checkpoint-12"
    read = checkpoint.load(folder)
    assert same(dict(read.parts), state())
    assert (read.step, read.world_size, read.local) == (12, 1, None)
    assert read.settings == {"lr": 3e-4}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.bool]
)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    x = torch.tensor([0.0, -1.5, 3.0]).to(dtype)
    back = checkpoint.load(checkpoint.save(tmp_path, 1, {"x": x})).parts["x"]
    assert back.dtype == dtype
    assert back.equal(x)


def test_nan_and_negative_zero_keep_their_bits(tmp_path):
    x = torch.tensor([-0.0, math.nan, math.inf])
    back = checkpoint.load(checkpoint.save(tmp_path, 1, {"x": x, "y": -0.0})).parts
    assert back["x"].view(torch.int32).equal(x.view(torch.int32))
    assert math.copysign(1, back["y"]) == -1


def test_views_and_transposes_are_stored_as_what_they_show(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    views = {"row": base[1], "t": base.t(), "flat": base.view(-1), "base": base, "step": base[::2]}
    folder = checkpoint.save(tmp_path, 1, {"v": views})
    back = checkpoint.load(folder).parts["v"]
    assert all(back[k].equal(v) for k, v in views.items())
    back["base"].zero_()
    assert back["flat"].sum() == 66  # no memory shared after reading


def test_parameters_are_stored_without_their_gradient(tmp_path):
    p = torch.nn.Parameter(torch.ones(2))
    (p * 2).sum().backward()
    back = checkpoint.load(checkpoint.save(tmp_path, 1, {"p": p})).parts["p"]
    assert type(back) is torch.Tensor
    assert not back.requires_grad


def test_tied_weights_are_stored_once():
    w = torch.ones(2, 2)
    encoded, tensors = split({"a": w, "b": w, "c": w.clone()})
    assert len(tensors) == 2
    assert same(join(encoded, tensors), {"a": w, "b": w, "c": w})


def test_keys_that_spell_the_same_path_stay_apart():
    tree = {1: torch.zeros(1), "1": torch.ones(1), "a/b": torch.ones(2), "a": {"b": torch.ones(3)}}
    assert same(join(*split(tree)), tree)


class Color(str, Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"a": [1, object()]}, "state/kl/a/1 is a builtins.object"),
        ({"a": {1, 2}}, "state/kl/a is a builtins.set"),
        ({"a": b"bytes"}, "state/kl/a is a builtins.bytes"),
        ({"a": Color.RED}, "state/kl/a is the enum member <Color.RED"),
        ({(1, 2): 1}, r"keys of state/kl must be strings or numbers, got \(1, 2\)"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "state/kl/a is a torch.complex64"),
        ({"a": torch.zeros(2).to_sparse()}, "state/kl/a is a torch.float32 tensor of layout"),
        ({"a": torch.zeros(2, device="meta")}, "state/kl/a is .* on meta"),
    ],
)
def test_what_cannot_be_stored_is_named_and_leaves_nothing(tmp_path, bad, where):
    with pytest.raises(CheckpointError, match=where):
        checkpoint.save(tmp_path, 1, {"kl": bad})
    assert list(tmp_path.iterdir()) == []


def test_weights_and_optimizer_are_separate_files_and_none_is_a_pickle(tmp_path):
    folder = checkpoint.save(tmp_path, 1, state())
    names = {p.name for p in folder.iterdir()}
    assert {"state-learner.model.safetensors", "state-learner.optimizer.safetensors"} <= names
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}


def test_models_are_written_into_the_same_folder_and_checked_too(tmp_path):
    def write_models(folder: Path) -> None:
        (folder / "value_model").mkdir()
        (folder / "value_model" / "config.json").write_text("{}")

    folder = checkpoint.save(tmp_path, 1, {"a": 1}, write_models=write_models)
    (folder / "value_model" / "config.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"value_model/config.json must have 2 bytes, got 3"):
        checkpoint.verify(folder)


def test_what_the_models_hold_is_not_written_again(tmp_path):
    draw = torch.Generator().manual_seed(0)
    shared = torch.randn(64, 32, generator=draw)
    almost = shared.clone()
    almost[63, 31] += 1  # not among the numbers that are looked at first
    zeros = torch.zeros(2048)
    parts = {"learner": {"weights": [shared, almost, -zeros], "small": torch.ones(3)}}

    def write(folder: Path) -> None:
        (folder / "value_model").mkdir()
        save_file(
            {"w": shared.clone(), "z": zeros, "small": torch.ones(3)},
            str(folder / "value_model" / "model.safetensors"),
        )

    folder = checkpoint.save(tmp_path, 1, parts, write_models=write)
    twins = json.loads((folder / "state.json").read_text())["elsewhere"]
    assert twins == {"state/learner/weights/0": ["value_model/model.safetensors", "w"]}
    assert len(load_file(str(folder / "state-learner.weights.safetensors"))) == 2
    assert same(checkpoint.load(folder).parts, parts)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left.*; make room on that disk; resume"),
        (OSError(30, "Read-only file system"), "Read-only.*; mount it writable; resume"),
        (
            OSError(13, "Permission denied"),
            "denied; grant this user write permission there; resume",
        ),
        (SafetensorError("I/O error: Read-only file system (os error 30)"), "; mount it writable;"),
    ],
)
def test_a_failing_write_keeps_the_checkpoint_before(tmp_path, error, said):
    checkpoint.save(tmp_path, 1, {"a": 1})

    def refused(folder: Path) -> None:
        raise error

    with pytest.raises(CheckpointError, match=f"checkpoint-2: .*{said}"):
        checkpoint.save(tmp_path, 2, {"a": 2}, write_models=refused)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, 1, {"a": 1})
    folder = checkpoint.save(tmp_path, 1, {"a": 2})
    assert checkpoint.load(folder).parts == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


# ---------------------------------------------------------------------------- damage


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(bytes(data))


def file_names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_every_single_damage_is_found(tmp_path):
    folder = checkpoint.save(tmp_path, 7, state())
    for name in file_names(folder):
        file = folder / name
        whole = file.read_bytes()
        damages = {
            "truncated": whole[: len(whole) // 2],
            "emptied": b"",
            "grown": whole + b"x",
            "missing": None,
        }
        for data in damages.values():
            file.unlink()
            if data is not None:
                file.write_bytes(data)
            with pytest.raises(CheckpointError, match="checkpoint-7") as e:
                checkpoint.load(folder)
            assert name in str(e.value)
            file.write_bytes(whole)
    checkpoint.verify(folder)


def test_a_flipped_byte_anywhere_is_found_or_harmless(tmp_path):
    folder = checkpoint.save(tmp_path, 7, {"a": {"b": {"w": torch.arange(40.0)}}, "n": 5})
    for name in file_names(folder):
        file = folder / name
        whole = file.read_bytes()
        for at in range(0, len(whole), 7):
            flip(file, at)
            try:
                read = checkpoint.load(folder).parts
            except CheckpointError as e:
                message = str(e)
            else:  # the manifest's own white space
                message = "checkpoint-7" if name == "manifest.json" else "not noticed"
                assert read["a"]["b"]["w"].equal(torch.arange(40.0))
            assert "checkpoint-7" in message
            file.write_bytes(whole)


def test_latest_good_warns_and_falls_back(tmp_path):
    for step in (2, 10, 9):
        checkpoint.save(tmp_path, step, state(step))
    assert checkpoint.latest_good(tmp_path).name == "checkpoint-10"
    flip(tmp_path / "checkpoint-10" / "state-learner.model.safetensors", -3)
    (tmp_path / "checkpoint-9" / "state.json").unlink()
    with pytest.warns(UserWarning, match="Resuming from .*checkpoint-2") as caught:
        assert checkpoint.latest_good(tmp_path).name == "checkpoint-2"
    text = " ".join(str(w.message) for w in caught)
    assert "checkpoint-10 is damaged: state-learner.model.safetensors has changed since" in text
    assert "checkpoint-9 is damaged: state.json is missing" in text


def rewritten(folder: Path, change) -> None:
    """Change state.json, with a manifest that fits."""
    head = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(change(head)))
    (folder / "manifest.json").unlink()
    write_manifest(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda head: head | {"parts": {}}, r"state.json cannot be loaded \(ValueError"),
        (lambda head: head | {"parts": 3}, r"parts in state.json must be a mapping, got '3'"),
        (lambda head: {"format": 1}, r"cannot be loaded \(KeyError: 'world_size'"),
        (lambda head: [], "cannot be loaded"),
        (lambda head: head | {"files": head["files"][1:]}, "no file has the tensor 'state/"),
        (lambda head: head | {"files": ["state.json"]}, "could not read .*state.json"),
        (lambda head: head | {"elsewhere": {"x": ["none.safetensors", "y"]}}, "could not read"),
    ],
)
def test_nonsense_in_a_checkpoint_is_damage_and_the_one_before_is_taken(tmp_path, change, said):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step))
    rewritten(tmp_path / "checkpoint-2", change)
    with pytest.raises(CheckpointError, match=f"{said}.*an earlier one, such as .*checkpoint-1"):
        checkpoint.load_one(tmp_path / "checkpoint-2", checkpoint.load)
    loaded = []

    def attempt(folder):
        loaded.append(checkpoint.load(folder).step)

    with pytest.warns(UserWarning, match="checkpoint-2.*Resuming from .*checkpoint-1"):
        checkpoint.load_latest(tmp_path, attempt)
    assert loaded == [1]
    rewritten(tmp_path / "checkpoint-1", change)
    with pytest.warns(UserWarning, match=said), pytest.raises(CheckpointError, match=said):
        checkpoint.load_latest(tmp_path, attempt)


def test_what_is_damaged_on_one_rank_is_passed_over_by_all(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step))
    loaded, votes = [], [True, False]
    with pytest.warns(UserWarning, match="another rank cannot load .*checkpoint-2"):
        checkpoint.load_latest(tmp_path, loaded.append, anywhere=lambda failed: votes.pop(0))
    assert [folder.name for folder in loaded] == ["checkpoint-2", "checkpoint-1"]


def test_a_checkpoint_of_another_run_is_not_passed_over(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), settings={"a": 1})
    with pytest.raises(CheckpointError, match="a: 1 in the checkpoint, 2 now"):
        checkpoint.load_latest(
            tmp_path, lambda f: checkpoint.load(f, settings={"a": 2}, must_match={"a"})
        )


def test_no_checkpoint_is_none_and_only_damaged_ones_raise(tmp_path):
    assert checkpoint.latest_good(tmp_path) is None
    assert checkpoint.latest_good(tmp_path / "absent") is None
    folder = checkpoint.save(tmp_path, 1, {"a": 1})
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged: .*checkpoint-1"):
        checkpoint.latest_good(tmp_path)


def test_a_missing_checkpoint_lists_what_there_is(tmp_path):
    checkpoint.save(tmp_path, 1, {"a": 1})
    with pytest.raises(
        CheckpointError, match=r"checkpoint-5 does not exist; existing checkpoints: checkpoint-1"
    ):
        checkpoint.load(tmp_path / "checkpoint-5")


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    folder = checkpoint.save(tmp_path, 1, {"a": 1})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="must have format 1, got 99"):
        checkpoint.load(folder)


# -------------------------------------------------------------------------- rotation


def steps(root: Path) -> list[int]:
    return [checkpoint.parse_step(p) for p in checkpoint.checkpoints(root)]


def test_rotation_orders_by_number_and_keeps_the_best(tmp_path):
    for step in (1, 2, 9, 10, 11):
        checkpoint.save(tmp_path, step, {"a": step})
    gone = checkpoint.rotate(tmp_path, 3, keep=[tmp_path / "checkpoint-1", None])
    assert [p.name for p in gone] == ["checkpoint-2", "checkpoint-9"]
    assert steps(tmp_path) == [1, 10, 11]
    checkpoint.rotate(tmp_path, 1, keep=["checkpoint-1"])
    assert steps(tmp_path) == [1, 11]


@pytest.mark.parametrize("limit", [None, 0, 3, 4])
def test_rotation_without_need_deletes_nothing(tmp_path, limit):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"a": step})
    assert checkpoint.rotate(tmp_path, limit) == []


def test_rotation_never_deletes_the_newest_whole_one(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"a": step})
    (tmp_path / "checkpoint-3" / "state.json").write_text("{}")
    checkpoint.rotate(tmp_path, 1)
    assert 2 in steps(tmp_path)


def test_rotation_keeps_the_one_just_saved_on_an_older_branch(tmp_path):
    for step in (4, 6, 3):  # resumed from 2, while 4 and 6 of the first run are still there
        saved = checkpoint.save(tmp_path, step, {"a": step})
    checkpoint.rotate(tmp_path, 2, keep=[saved])
    assert steps(tmp_path) == [3, 6]


def test_other_folders_are_left_alone(tmp_path):
    for name in ("checkpoint-best", "checkpoint-1x", "runs"):
        (tmp_path / name).mkdir()
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"a": step})
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


def test_two_ranks_without_a_barrier_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a barrier"):
        checkpoint.save(tmp_path, 1, {}, world_size=2)


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
    with pytest.raises(CheckpointError, match=r"learning_rate: 3e-06 .*another output_dir"):
        checkpoint.load(folder, settings=now, must_match=["learning_rate"])


# ------------------------------------------------------------------------------ kills

KILLS = """
    import json, os, shutil, signal, sys
    from pathlib import Path
    import torch
    from kedge.engine.checkpoint import checkpoint
    from kedge.engine.checkpoint import folders as checkpoint_folders
    from kedge.engine.checkpoint import serialization as tree

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
        half = checkpoint_folders.zlib.crc32
        checkpoint_folders.zlib = type("Z", (), {"crc32": staticmethod(dying(half))})

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
            good = checkpoint.latest_good(root)
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
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_kill_at_any_call_leaves_a_whole_checkpoint(tmp_path):
    report = json.loads(run(KILLS, tmp_path / "run").stdout.splitlines()[-1])
    for redo in (0, 100):
        rows = [r for r in report if r["redo"] == redo]
        assert len(rows) > 15  # the instrument does fire, at every call
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


ENDLESS = """
    import sys
    from pathlib import Path
    import torch
    from kedge.engine.checkpoint import checkpoint
    root = Path(sys.argv[1])
    print("go", flush=True)
    for step in range(1, 10**6):
        checkpoint.save(root, step, {"w": torch.full((20000,), float(step)), "n": step})
        checkpoint.rotate(root, 2)
"""


@pytest.mark.slow
def test_a_kill_at_a_random_time_leaves_a_whole_checkpoint(tmp_path):
    for i, delay in enumerate((0.05, 0.11, 0.17, 0.4)):
        root = tmp_path / str(i)
        command = [sys.executable, "-c", textwrap.dedent(ENDLESS), str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "go\n"
            while not checkpoint.checkpoints(root):
                time.sleep(0.01)
            time.sleep(delay)
            process.kill()
        checkpoint.tidy(root)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing damaged, nothing passed over
            read = checkpoint.load(checkpoint.latest_good(root))
        assert (read.parts["w"] == read.parts["n"]).all()
        assert 1 <= len(checkpoint.checkpoints(root)) <= 3
