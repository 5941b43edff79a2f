"""Tensors of a checkpoint's state that its model files hold: written once, read from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kedge.errors import DamagedCheckpointError

SMALL = 1024  # elements; a smaller tensor is not worth a look
SAMPLES = 64

Key = tuple[str, tuple[int, ...], bytes]
Duplicates = dict[str, tuple[str, str]]


def find_duplicates(folder: Path, tensors: Mapping[str, Tensor]) -> Duplicates:
    """Which tensors lie in a safetensors file of a folder, equal bit for bit.

    Args:
        folder: where the models of a checkpoint are, and none of its state yet.
        tensors: the state's, by label.

    Returns:
        label -> file, relative to the folder, and the tensor's name in it.
    """
    wanted: dict[Key, list[str]] = {}
    for label, x in tensors.items():
        if x.numel() >= SMALL:
            wanted.setdefault(_key(x), []).append(label)
    found: Duplicates = {}
    for file in sorted(folder.rglob("*.safetensors")) if wanted else ():
        if file.name.startswith("rank-"):  # another rank may be at it
            continue
        with safe_open(str(file), "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                x = stored.get_tensor(name)
                if x.numel() < SMALL:
                    continue
                for label in wanted.get(_key(x), ()):
                    if label not in found and _same(x, tensors[label]):
                        found[label] = (file.relative_to(folder).as_posix(), name)
    return found


def read_duplicates(folder: Path, twins: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """The tensors that ``find_duplicates`` found.

    Raises:
        DamagedCheckpointError: a file cannot be read.
    """
    by_file: dict[str, dict[str, str]] = {}
    for label, (file, name) in twins.items():
        by_file.setdefault(file, {})[label] = name
    found: dict[str, Tensor] = {}
    for file, names in by_file.items():
        found |= _read(folder / file, names)
    return found


def _read(file: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    try:
        with safe_open(str(file), "pt") as stored:
            return {label: stored.get_tensor(name).clone() for label, name in names.items()}
    except (SafetensorError, OSError) as e:
        raise DamagedCheckpointError(f"could not read {file}: {e}") from e


def _key(x: Tensor) -> Key:
    """What equal tensors share, and few others: type, shape, and some of the numbers."""
    flat = x.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
    return str(x.dtype), tuple(x.shape), some.view(torch.uint8).numpy().tobytes()


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit: 0 is not -0, and NaN is itself."""
    first, second = (x.detach().cpu().contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)
