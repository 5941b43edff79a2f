"""Checkpoints come back bit for bit."""

from enum import Enum
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from kedge.checkpoint import checkpoint
from kedge.checkpoint.serialization import join, split
from kedge.errors import CheckpointError
from tests.unit.checkpoint_state import same, state


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


def test_models_are_written_into_the_same_folder_and_checked_too(tmp_path):
    def write_models(folder: Path) -> None:
        (folder / "value_model").mkdir()
        (folder / "value_model" / "config.json").write_text("{}")

    folder = checkpoint.save(tmp_path, 1, {"a": 1}, write_models=write_models)
    (folder / "value_model" / "config.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"value_model/config.json must have 2 bytes, got 3"):
        checkpoint.verify(folder)


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
