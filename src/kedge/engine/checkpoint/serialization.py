"""Nested state as files: tensors in safetensors, everything else in JSON, no pickle.

A tree is made of dicts, lists and tuples; its leaves are tensors, numbers, strings, booleans and
None.  It comes back equal bit for bit, with the types of keys and containers it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kedge.errors import CheckpointError, DamagedCheckpointError

Path_ = tuple[str, ...]
_SCALARS = (bool, int, str, type(None))


def split(tree: Any, *, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Cut a tree into JSON and tensors.

    Args:
        tree: nested dicts (keys: str, int, float, bool or None), lists and tuples.
        name: what errors and tensor names start with.

    Returns:
        A JSON value that refers to tensors by name, and the tensors.  A tensor that occurs twice
        (the same memory, shape and strides: tied weights) is listed once.

    Raises:
        CheckpointError: a leaf or key of another type; says where it sits.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[object, ...], str] = {}

    def leaf(x: Tensor, path: Path_) -> dict[str, str]:
        if x.layout is not torch.strided or x.is_complex() or x.is_quantized or x.is_meta:
            raise CheckpointError(
                f"{_where(path)} is a {x.dtype} tensor of layout {x.layout} on {x.device}; "
                "a checkpoint holds dense real tensors: convert it in state_dict()"
            )
        x = x.detach()
        key = (x.data_ptr(), x.device, x.dtype, tuple(x.shape), x.stride())
        label = seen.get(key) if x.numel() else None
        if label is None:
            label = _free_name("/".join(path), tensors)
            tensors[label] = x
            seen[key] = label
        return {"tensor": label}

    return _encode(tree, (name,), leaf), tensors


def join(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that ``split`` cut.

    Raises:
        DamagedCheckpointError: a tensor is missing; another error where ``encoded`` was changed.
    """
    if isinstance(encoded, list):
        return [join(x, tensors) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, body),) = encoded.items()
    if kind == "tensor":
        if body not in tensors:
            raise DamagedCheckpointError(f"no file holds the tensor {body!r}")
        return tensors[body]
    if kind == "float":
        return float(body)
    if kind == "tuple":
        return tuple(join(x, tensors) for x in body)
    if kind == "dict":
        return {k: join(v, tensors) for k, v in body.items()}
    if kind == "items":
        return {join(k, tensors): join(v, tensors) for k, v in body}
    raise CheckpointError(f"unknown kind of value {kind!r}: written by a newer version of Kedge?")


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to one safetensors file, from any device, tied or not."""
    ready: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, x in tensors.items():
        flat = x.detach().cpu().contiguous()
        storage = flat.untyped_storage().data_ptr()
        if storage in storages:  # safetensors refuses memory that two tensors share
            flat = flat.clone()
        elif flat.numel():
            storages.add(storage)
        ready[name] = flat
    try:
        save_file(ready, str(file))
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"could not write {file}: {e}") from e


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read one safetensors file to the CPU; the tensors own their memory."""
    try:
        return {name: x.clone() for name, x in load_file(str(file)).items()}
    except (SafetensorError, OSError, ValueError) as e:
        raise DamagedCheckpointError(f"could not read {file}: {e}") from e


def _encode(x: Any, path: Path_, leaf: Callable[[Tensor, Path_], object]) -> Any:
    if isinstance(x, Tensor):
        return leaf(x, path)
    if isinstance(x, Enum):
        raise CheckpointError(f"{_where(path)} is {x!r}; put its value into state_dict() instead")
    if isinstance(x, float):
        return float(x) if math.isfinite(x) else {"float": repr(float(x))}
    if isinstance(x, _SCALARS):
        return x
    if isinstance(x, list):
        return [_encode(v, (*path, str(i)), leaf) for i, v in enumerate(x)]
    if type(x) in (tuple, torch.Size):
        return {"tuple": [_encode(v, (*path, str(i)), leaf) for i, v in enumerate(x)]}
    if isinstance(x, Mapping):
        return _encode_mapping(x, path, leaf)
    raise CheckpointError(
        f"{_where(path)} is a {type(x).__module__}.{type(x).__qualname__}; a checkpoint holds "
        "tensors, numbers, strings, booleans, None, and dicts, lists and tuples of them"
    )


def _encode_mapping(
    x: Mapping[Any, Any], path: Path_, leaf: Callable[[Tensor, Path_], object]
) -> Any:
    if all(type(k) is str for k in x):
        return {"dict": {k: _encode(v, (*path, k), leaf) for k, v in x.items()}}
    bad = [k for k in x if not isinstance(k, (*_SCALARS, float)) or isinstance(k, Enum)]
    if bad:
        raise CheckpointError(f"{_where(path)} has the key {bad[0]!r}; use a string or a number")
    pairs = [(_encode(k, path, leaf), _encode(v, (*path, str(k)), leaf)) for k, v in x.items()]
    return {"items": [[k, v] for k, v in pairs]}


def _free_name(wanted: str, taken: Mapping[str, object]) -> str:
    """``wanted``, or with a number behind it: the keys 1 and "1" spell the same path."""
    name, n = wanted, 1
    while name in taken or name == "__metadata__":
        name, n = f"{wanted}~{n}", n + 1
    return name


def _where(path: Path_) -> str:
    return "/".join(path)
