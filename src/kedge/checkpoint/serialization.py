"""Nested state as files: tensors in safetensors, everything else in JSON, no pickle.

A tree consists of dicts, lists and tuples; its leaves are tensors, numbers, strings, booleans and
None.  It is restored bitwise, with the same types of keys and containers.
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
from torch.distributed.tensor import DTensor

from kedge.errors import CheckpointError, DamagedCheckpointError

KeyPath = tuple[str, ...]
_SCALARS = (bool, int, str, type(None))


def split(tree: Any, *, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Split a tree into JSON and tensors.

    Args:
        tree: nested dicts (keys: str, int, float, bool or None), lists and tuples.
        name: prefix of tensor names and of paths in errors.

    Returns:
        A JSON value that refers to tensors by name, and the tensors.  Tied tensors (same memory,
        shape and strides) are stored once.

    Raises:
        CheckpointError: a leaf or key of another type; the message has its path.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[object, ...] | None, str] = {}

    def leaf(x: Tensor, path: KeyPath) -> dict[str, str]:
        if x.layout is not torch.strided or x.is_complex() or x.is_quantized or x.is_meta:
            raise CheckpointError(
                f"{'/'.join(path)} is a {x.dtype} tensor of layout {x.layout} on {x.device}; "
                "a checkpoint can store only dense real tensors: convert it in state_dict()"
            )
        x, label, number, key = x.detach(), "/".join(path), 1, None
        if x.numel() and not isinstance(x, DTensor):  # whose labels must be the same on all ranks
            key = (x.data_ptr(), x.device, x.dtype, tuple(x.shape), x.stride())
        if key in seen:
            return {"tensor": seen[key]}
        while label in tensors or label == "__metadata__":  # the keys 1 and "1" have the same path
            label, number = f"{'/'.join(path)}~{number}", number + 1
        tensors[label] = x
        if key is not None:
            seen[key] = label
        return {"tensor": label}

    return _encode(tree, (name,), leaf), tensors


def join(encoded: Any, tensors: Mapping[str, Any]) -> Any:
    """Restore the tree from the output of ``split``.

    Raises:
        DamagedCheckpointError: a tensor is missing; other errors if ``encoded`` is damaged.
    """
    if isinstance(encoded, list):
        return [join(x, tensors) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, body),) = encoded.items()
    if kind == "tensor":
        if body not in tensors:
            raise DamagedCheckpointError(f"no file has the tensor {body!r}")
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
        if storage in storages:  # safetensors does not support shared memory
            flat = flat.clone()
        elif flat.numel():
            storages.add(storage)
        ready[name] = flat
    try:
        save_file(ready, str(file))
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"could not write {file}: {e}") from e


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read one safetensors file into CPU memory, without memory mapping."""
    try:
        return {name: x.clone() for name, x in load_file(str(file)).items()}
    except (SafetensorError, OSError, ValueError) as e:
        raise DamagedCheckpointError(f"could not read {file}: {e}") from e


def _encode(x: Any, path: KeyPath, leaf: Callable[[Tensor, KeyPath], object]) -> Any:
    if isinstance(x, Tensor):
        return leaf(x, path)
    if isinstance(x, Enum):
        raise CheckpointError(
            f"{'/'.join(path)} is the enum member {x!r}; store its value in state_dict() instead"
        )
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
        f"{'/'.join(path)} is a {type(x).__module__}.{type(x).__qualname__}; a checkpoint can "
        "store tensors, numbers, strings, booleans, None, and dicts, lists and tuples of them"
    )


def _encode_mapping(
    x: Mapping[Any, Any], path: KeyPath, leaf: Callable[[Tensor, KeyPath], object]
) -> Any:
    if all(type(k) is str for k in x):
        return {"dict": {k: _encode(v, (*path, k), leaf) for k, v in x.items()}}
    bad = [k for k in x if not isinstance(k, (*_SCALARS, float)) or isinstance(k, Enum)]
    if bad:
        raise CheckpointError(
            f"keys of {'/'.join(path)} must be strings or numbers, got {bad[0]!r}"
        )
    pairs = [(_encode(k, path, leaf), _encode(v, (*path, str(k)), leaf)) for k, v in x.items()]
    return {"items": [[k, v] for k, v in pairs]}
