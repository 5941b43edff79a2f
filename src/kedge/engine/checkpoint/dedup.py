"""Deduplication of checkpoint tensors that are already in model files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kedge.errors import DamagedCheckpointError

SMALL = 1024  # elements; smaller tensors are not compared
SAMPLES = 64  # elements of a tensor in its key

Key = tuple[str, tuple[int, ...], bytes]
Duplicates = dict[str, tuple[str, str]]


def find_duplicates(folder: Path, tensors: Mapping[str, Tensor]) -> Duplicates:
    """Find tensors that a safetensors file of a folder has with bitwise equal values.

    Args:
        folder: has the model files of a checkpoint, but not its state yet.
        tensors: tensors of the state, by label.

    Returns:
        label -> (file relative to the folder, name of the tensor in it).
    """
    labels: dict[Key, list[str]] = {}
    for label, x in tensors.items():
        if x.numel() >= SMALL:
            labels.setdefault(_key(x), []).append(label)
    duplicates: Duplicates = {}
    for file in sorted(folder.rglob("*.safetensors")) if labels else ():
        if file.name.startswith("rank-"):  # another rank may be writing it
            continue
        with safe_open(str(file), "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                x = stored.get_tensor(name)
                if x.numel() < SMALL:
                    continue
                for label in labels.get(_key(x), ()):
                    if label not in duplicates and _same(x, tensors[label]):
                        duplicates[label] = (file.relative_to(folder).as_posix(), name)
    return duplicates


def read_duplicates(folder: Path, duplicates: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """Read the tensors found by ``find_duplicates`` from the model files.

    Raises:
        DamagedCheckpointError: a file cannot be read.
    """
    by_file: dict[str, dict[str, str]] = {}
    for label, (file, name) in duplicates.items():
        by_file.setdefault(file, {})[label] = name
    tensors: dict[str, Tensor] = {}
    for file, names in by_file.items():
        tensors |= _read(folder / file, names)
    return tensors


def _read(file: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    try:
        with safe_open(str(file), "pt") as stored:
            return {label: stored.get_tensor(name).clone() for label, name in names.items()}
    except (SafetensorError, OSError) as e:
        raise DamagedCheckpointError(f"could not read {file}: {e}") from e


def _key(x: Tensor) -> Key:
    """Hash key of a tensor: dtype, shape and a sample of its values."""
    flat = x.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
    return str(x.dtype), tuple(x.shape), sample.view(torch.uint8).numpy().tobytes()


def _same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality: 0 differs from -0, and NaN equals itself."""
    first, second = (x.detach().cpu().contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)
