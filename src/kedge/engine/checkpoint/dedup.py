"""Deduplication of checkpoint tensors that are already in model files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from kedge.errors import DamagedCheckpointError

SMALL = 1024  # elements; smaller tensors are not compared
SAMPLES = 64  # elements of a tensor in its key

Index = tuple[tuple[int, int], ...]  # (start, stop) per dimension; empty: all
Key = tuple[str, bytes]
Duplicates = dict[str, tuple[str, str]]


def find_duplicates(
    folder: Path, tensors: Mapping[str, Tensor]
) -> dict[str, list[tuple[str, str]]]:
    """Find tensors that a safetensors file of a folder has with bitwise equal values.

    Args:
        folder: has the model files of a checkpoint, but not its state yet.
        tensors: tensors of the state, by label; of sharded ones this rank's shard is compared.

    Returns:
        label -> (file relative to the folder, name of the tensor in it), at least one.
    """
    local: dict[str, Tensor] = {}
    by_shape: dict[tuple[int, ...], dict[Index, dict[Key, list[str]]]] = {}
    for label, x in tensors.items():
        if x.numel() >= SMALL:
            local[label], index = local_part(x)
            keys = by_shape.setdefault(tuple(x.shape), {}).setdefault(index, {})
            keys.setdefault(_key(local[label]), []).append(label)
    duplicates: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(folder.rglob("*.safetensors")) if local else ():
        if file.name.startswith("rank-"):  # another rank may be writing it
            continue
        with safe_open(str(file), "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                shape = tuple(stored.get_slice(name).get_shape())
                for index, keys in by_shape.get(shape, {}).items():
                    x = read_part(stored, name, index)
                    for label in keys.get(_key(x), ()):
                        if _same(x, local[label]):
                            place = (file.relative_to(folder).as_posix(), name)
                            duplicates.setdefault(label, []).append(place)
    return duplicates


def local_part(x: Tensor) -> tuple[Tensor, Index]:
    """The part of a tensor that this rank holds, and where it is in the tensor."""
    if not isinstance(x, DTensor):
        return x, ()
    sizes, starts = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return x.to_local(), tuple((i, i + n) for i, n in zip(starts, sizes, strict=True))


def read_part(stored: Any, name: str, index: Index) -> Tensor:
    """A part of a tensor in an open safetensors file."""
    if not index:
        return stored.get_tensor(name)
    if any(start >= stop for start, stop in index):  # the rank has no rows of a short tensor
        return stored.get_tensor(name).new_empty([stop - start for start, stop in index])
    return stored.get_slice(name)[tuple(slice(start, stop) for start, stop in index)]


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
    """Hash key of a tensor: dtype and a sample of its values."""
    flat = x.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
    return str(x.dtype), sample.view(torch.uint8).numpy().tobytes()


def _same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality: 0 differs from -0, and NaN equals itself."""
    first, second = (x.detach().cpu().contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)
