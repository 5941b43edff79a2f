"""Checkpoints: bit for bit, damage, rotation, ranks, settings, and kills while one is written;
recorded samples come back equal, and drive a run in the place of a sampler.
"""

import datetime
import json
import math
import re
import struct
import subprocess
import textwrap
import threading
import warnings
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from kedge.checkpoint import checkpoint
from kedge.checkpoint.checkpoint import write_manifest
from kedge.checkpoint.replay import RolloutRecorder, RolloutReplay, pack, unpack
from kedge.checkpoint.serialization import join, split
from kedge.records.errors import CheckpointError, RolloutError
from kedge.records.types import PromptBatch, RewardOutput, Sampling
from tests import processes
from tests.unit.advantage_inputs import rollout


def test_round_trip_is_bit_exact(tmp_path):
    folder = checkpoint.save(tmp_path, 12, state(), settings={"lr": 3e-4})
    assert folder == tmp_path / "checkpoint-12"
    read = checkpoint.load(folder)
    assert same(dict(read.parts), state())
    assert (read.step, read.world_size, read.local) == (12, 1, None)
    assert read.settings == {"lr": 3e-4}
    names = {p.name for p in folder.iterdir()}  # weights and optimizer apart, no pickle
    assert {"state-learner.model.safetensors", "state-learner.optimizer.safetensors"} <= names
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}


def test_views_and_parameters_are_stored_as_what_they_show(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    parameter = torch.nn.Parameter(torch.ones(2))
    (parameter * 2).sum().backward()
    views = {"row": base[1], "t": base.t(), "flat": base.view(-1), "base": base, "step": base[::2]}
    folder = checkpoint.save(tmp_path, 1, {"v": views | {"p": parameter}})
    back = checkpoint.load(folder).parts["v"]
    assert all(back[k].equal(v) for k, v in views.items())
    back["base"].zero_()
    assert back["flat"].sum() == 66  # no memory shared after reading
    assert type(back["p"]) is torch.Tensor
    assert not back["p"].requires_grad


def test_tied_weights_are_stored_once():
    w = torch.ones(2, 2)
    encoded, tensors = split({"a": w, "b": w, "c": w.clone()})
    assert len(tensors) == 2
    assert same(join(encoded, tensors), {"a": w, "b": w, "c": w})


class Color(str, Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"a": [1, object()]}, "state/kl/a/1 is a builtins.object"),
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
    folder = checkpoint.save(tmp_path, 1, {"a": 2})  # the same step again replaces it

    def refused(folder: Path) -> None:
        raise error

    with pytest.raises(CheckpointError, match=f"checkpoint-2: .*{said}"):
        checkpoint.save(tmp_path, 2, {"a": 2}, write_models=refused)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert checkpoint.load(folder).parts == {"a": 2}


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
        for data in (whole[: len(whole) // 2], b"", whole + b"x", None):
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
        (lambda head: head | {"parts": 3}, r"state.json cannot be loaded \(TypeError"),
        (lambda head: {"format": 2}, r"cannot be loaded \(KeyError: 'world_size'"),
        (lambda head: [], "cannot be loaded"),
        (lambda head: head | {"files": head["files"][1:]}, "no file has the tensor 'state/"),
        (lambda head: head | {"files": ["state.json"]}, "could not read .*state.json"),
    ],
)
def test_nonsense_in_a_checkpoint_is_damage_and_the_one_before_is_taken(
    tmp_path, change, said, logged
):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step))
    rewritten(tmp_path / "checkpoint-2", change)
    with pytest.raises(CheckpointError, match=f"{said}.*an earlier one, such as .*checkpoint-1"):
        checkpoint.load_one(tmp_path / "checkpoint-2", checkpoint.load)
    loaded = []

    def attempt(folder):
        loaded.append(checkpoint.load(folder).step)

    with logged("checkpoint-2.*Resuming from .*checkpoint-1"):
        checkpoint.load_latest(tmp_path, attempt)
    assert loaded == [1]
    rewritten(tmp_path / "checkpoint-1", change)
    with pytest.raises(CheckpointError, match=f"all checkpoints in .* are damaged: .*{said}"):
        checkpoint.load_latest(tmp_path, attempt)


def test_what_is_damaged_on_one_rank_is_passed_over_by_all(tmp_path, logged):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step))
    loaded, votes = [], [True, False]
    with logged("another rank cannot load .*checkpoint-2"):
        checkpoint.load_latest(tmp_path, loaded.append, anywhere=lambda failed: votes.pop(0))
    assert [folder.name for folder in loaded] == ["checkpoint-2", "checkpoint-1"]


def test_a_checkpoint_of_another_run_is_not_passed_over(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), local={"rank": 0})
    with pytest.raises(CheckpointError, match="per-rank state of 1 processes, this run has 2"):
        checkpoint.load_latest(tmp_path, lambda f: checkpoint.load(f, world_size=2))


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    folder = checkpoint.save(tmp_path, 1, {"a": 1})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="must have format 2, got 99"):
        checkpoint.load(folder)


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


def test_another_number_of_ranks_warns_when_no_rank_has_state_of_its_own(tmp_path, logged):
    folder = checkpoint.save(tmp_path, 1, {"a": 1})
    with logged("written by 1 processes, this run has 4"):
        checkpoint.load(folder, world_size=4)


def test_differing_settings_are_listed(tmp_path, caplog, logged):
    saved = {"learning_rate": 3e-6, "seed": 1, "betas": (0.9, 0.99), "gone": None}
    saved["kl"] = {"coef": 0.05, "target": 6}
    folder = checkpoint.save(tmp_path, 1, {"a": 1}, settings=saved)
    checkpoint.load(folder, settings=saved)
    assert caplog.text == ""
    now = {"learning_rate": 1e-5, "seed": 1, "betas": (0.9, 0.99), "new": True}
    now["kl"] = {"coef": 0.1, "target": 6}
    with logged("other settings") as caught:
        checkpoint.load(folder, settings=now)
    text = caught.text
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


B, P, R = 3, 4, 5
SAMPLING = Sampling(max_new_tokens=R)


def sample(seed=0, rows=B, **kwargs):
    g = torch.Generator().manual_seed(seed)
    prompts = PromptBatch(
        ids=torch.randint(0, 9, (rows, P), generator=g),
        mask=torch.ones(rows, P, dtype=torch.bool),
        group=torch.arange(rows),
        row=torch.arange(rows),
        columns={"prompt": ["a", "b", "ü"][:rows], "chat": [[{"role": "user"}]] * rows},
    )
    mask = torch.rand(rows, R, generator=g) > 0.5
    made = rollout(
        mask,
        prompts=prompts,
        ids=torch.randint(0, 9, (rows, R), generator=g),
        terminated=mask[:, 0],
        policy_version=torch.full((rows,), 7),
        behavior_logprobs=torch.randn(rows, R, generator=g),
    )
    reward_output = RewardOutput(
        scores=torch.randn(rows, generator=g),
        valid=torch.ones(rows, dtype=torch.bool),
        components={"length": torch.tensor([1.0, float("nan"), 2.0])[:rows]},
    )
    return replace(made, **kwargs), reward_output


def test_a_sample_comes_back_equal(tmp_path):
    rollout, reward_output = sample()
    file = RolloutRecorder(tmp_path / "rec").write(12, rollout, reward_output)
    assert file.name == "step-000012.json"
    assert {p.name for p in file.parent.iterdir()} == {file.name, "step-000012.safetensors"}
    replay = RolloutReplay(tmp_path / "rec")
    assert replay.steps == [12]
    assert same(replay.read(12), (rollout, reward_output))
    rollout = replace(rollout, behavior_logprobs=None)
    RolloutRecorder(tmp_path).write(0, rollout, reward_output)
    replay = RolloutReplay(tmp_path)
    assert replay.logprob_kind == "none"
    assert same(replay.read(0)[0], rollout)


def test_a_column_that_is_no_json_is_left_out_by_name(tmp_path):
    rollout, reward_output = sample()
    columns = {"when": [datetime.date(2024, 1, 1)] * B, "prompt": ["a", "b", "c"]}
    rollout = replace(rollout, prompts=replace(rollout.prompts, columns=columns))
    with pytest.warns(UserWarning, match="column 'when' is not recorded"):
        RolloutRecorder(tmp_path).write(0, rollout, reward_output)
    assert RolloutReplay(tmp_path).read(0)[0].prompts.columns == {"prompt": ["a", "b", "c"]}


def test_a_missing_step_says_what_there_is(tmp_path):
    recorder = RolloutRecorder(tmp_path)
    for step in (0, 1, 2):
        recorder.write(step, *sample(step))
    with pytest.raises(
        CheckpointError, match=r"iteration 3 .* which has 3, 0 to 2; set max_steps=3"
    ):
        RolloutReplay(tmp_path).read(3)


def test_another_tokenizer_is_refused(tmp_path):
    about = {"tokenizer": "abc", "stop_ids": (1, 2)}
    RolloutRecorder(tmp_path, settings=about).write(0, *sample())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutReplay(tmp_path, settings=about)
    with pytest.raises(CheckpointError, match="tokenizer: 'abc' recorded, 'xyz' now"):
        RolloutReplay(tmp_path, settings=about | {"tokenizer": "xyz"})


def body(head, name):
    """The fields of a record of a recording."""
    return head["sample"]["dict"][name]["dict"]


DAMAGE = {
    "no about": lambda head: head.pop("about"),
    "no sample": lambda head: head.pop("sample"),
    "a number": lambda head: head.update(sample=3),
    "a list as a name": lambda head: body(head, "rollout").update(__record__=[1]),
    "another record": lambda head: body(head, "rollout").update(__record__="Response"),
    "a text as scores": lambda head: body(head, "reward_output").update(scores="x"),
    "ids of another shape": lambda head: body(head, "rollout").update(
        ids=body(head, "rollout")["terminated"]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_malformed_recording_is_named(damage, tmp_path):
    file = RolloutRecorder(tmp_path).write(0, *sample())
    head = json.loads(file.read_text())
    DAMAGE[damage](head)
    file.write_text(json.dumps(head))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        RolloutReplay(tmp_path)


def test_ranks_record_apart(tmp_path):
    for rank in (0, 1):
        RolloutRecorder(tmp_path, rank=rank, world_size=2).write(4, *sample(rank))
    for rank in (0, 1):
        replay = RolloutReplay(tmp_path, rank=rank, world_size=2)
        assert replay.steps == [4]
        assert same(replay.read(4)[0], sample(rank)[0])
    with pytest.raises(CheckpointError, match="no recorded samples for rank 0 of 1"):
        RolloutReplay(tmp_path)


def test_damage_is_named(tmp_path):
    file = RolloutRecorder(tmp_path).write(0, *sample())
    replay = RolloutReplay(tmp_path)
    tensors = file.with_suffix(".safetensors")
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:40])
    with pytest.raises(CheckpointError, match=r"step-000000.safetensors"):
        replay.read(0)
    tensors.write_bytes(whole)
    for text in ("{", "[]", '{"format": 2}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"step-000000.json"):
            replay.read(0)


def test_unknown_records_and_fields_are_named():
    tree = pack(sample()[1])
    with pytest.raises(CheckpointError, match="unknown record 'Verdict'"):
        unpack(tree | {"__record__": "Verdict"})
    with pytest.raises(CheckpointError, match="unknown record 'Tensor'"):
        unpack(tree | {"__record__": "Tensor"})
    with pytest.raises(CheckpointError, match=r"RewardOutput: .*'mood'"):
        unpack(tree | {"mood": 1})


def test_a_replay_stands_for_prompts_sampler_and_reward(tmp_path):
    recorder = RolloutRecorder(tmp_path)
    for step in (0, 1):
        recorder.write(step, *sample(step))
    run = RolloutReplay(tmp_path, rows=B)
    assert run.logprob_kind == "sampled"
    first, second = run.batch(0), run.batch(1)  # sampled ahead
    for step, prompts in ((0, first), (1, second)):
        rollout = run.generate(prompts, sampling=SAMPLING, seed=0)
        reward_output = run.score(rollout)
        assert same(rollout, sample(step)[0])
        assert same(reward_output, sample(step)[1])
    assert run.load_weights({}, 3) is None
    with pytest.raises(RolloutError, match="can only use the prompts of its recording"):
        run.generate(first, sampling=SAMPLING, seed=0)
    with pytest.raises(RolloutError, match="can only score the responses of its recording"):
        run.score(sample()[0])
    with pytest.raises(CheckpointError, match="must have 2 rows per process, got 3"):
        RolloutReplay(tmp_path, rows=2).batch(0)


def test_a_kill_while_rewriting_a_step_leaves_no_mixed_pair(tmp_path, monkeypatch):
    recorder = RolloutRecorder(tmp_path)
    recorder.write(0, *sample(0))
    recorder.write(1, *sample(1))
    recorder.write(0, *sample(5))  # replaces it
    recorder.write(2, *sample()).rename(tmp_path / "step-000002.part")  # killed

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("kedge.checkpoint.replay.write_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        recorder.write(1, *sample(5))
    assert RolloutReplay(tmp_path).steps == [0]
    assert same(RolloutReplay(tmp_path).read(0)[0], sample(5)[0])


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
        "keys": {1: torch.zeros(1), "1": torch.ones(1), "a/b": torch.ones(2)},
        "types": [torch.tensor([0.0, -1.5, 3.0]).to(dtype) for dtype in DTYPES],
        "signed": torch.tensor([-0.0, math.nan, math.inf]),
        "negative zero": -0.0,
        "nothing": torch.empty(0, 4),
    }


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]


def same(a: object, b: object) -> bool:
    """Equal in value, type, key types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = a.dtype == b.dtype and a.shape == b.shape
        return bits and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


def steps(root: Path) -> list[int]:
    return [checkpoint.parse_step(p) for p in checkpoint.checkpoints(root)]
