"""Damaged checkpoints are found and named, and the one before is taken."""

import json
from pathlib import Path

import pytest
import torch

from kedge.checkpoint import checkpoint
from kedge.checkpoint.checkpoint import write_manifest
from kedge.errors import CheckpointError
from tests.unit.checkpoint_state import state


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


def test_load_latest_warns_and_falls_back(tmp_path):
    for step in (2, 10, 9):
        checkpoint.save(tmp_path, step, state(step))
    assert checkpoint.load_latest(tmp_path).name == "checkpoint-10"
    flip(tmp_path / "checkpoint-10" / "state-learner.model.safetensors", -3)
    (tmp_path / "checkpoint-9" / "state.json").unlink()
    with pytest.warns(UserWarning, match="Resuming from .*checkpoint-2") as caught:
        assert checkpoint.load_latest(tmp_path).name == "checkpoint-2"
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
        (lambda head: head | {"parts": 3}, r"state.json cannot be loaded \(TypeError"),
        (lambda head: {"format": 2}, r"cannot be loaded \(KeyError: 'world_size'"),
        (lambda head: [], "cannot be loaded"),
        (lambda head: head | {"files": head["files"][1:]}, "no file has the tensor 'state/"),
        (lambda head: head | {"files": ["state.json"]}, "could not read .*state.json"),
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
    with pytest.raises(CheckpointError, match=f"all checkpoints in .* are damaged: .*{said}"):
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
        checkpoint.save(tmp_path, step, state(step), local={"rank": 0})
    with pytest.raises(CheckpointError, match="per-rank state of 1 processes, this run has 2"):
        checkpoint.load_latest(tmp_path, lambda f: checkpoint.load(f, world_size=2))


def test_no_checkpoint_is_none_and_only_damaged_ones_raise(tmp_path):
    assert checkpoint.load_latest(tmp_path) is None
    assert checkpoint.load_latest(tmp_path / "absent") is None
    folder = checkpoint.save(tmp_path, 1, {"a": 1})
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged: .*checkpoint-1"):
        checkpoint.load_latest(tmp_path)
    with pytest.raises(CheckpointError, match="5 does not exist; existing checkpoints: "):
        checkpoint.load(tmp_path / "checkpoint-5")


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    folder = checkpoint.save(tmp_path, 1, {"a": 1})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="must have format 2, got 99"):
        checkpoint.load(folder)
