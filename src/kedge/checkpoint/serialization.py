"""Nested state as files: tensors in safetensors, everything else in JSON, no pickle.

A tree consists of dicts, lists and tuples; its leaves are tensors, numbers, strings, booleans and
None.  It is restored bitwise, with the same types of keys and containers.

Each rank writes and reads its own shards of sharded tensors, in the folder ``shards``: safetensors
files of torch.distributed.checkpoint, which any number of ranks can read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.records.errors import CheckpointError, DamagedCheckpointError
from kedge.records.types import StoredTensor

SHARDS = "shards"
FILE_BYTES = 1 << 26  # size of one rank's files, each assembled in memory
Entry = Mapping[str, Any]
KeyPath = tuple[str, ...]
_SCALARS = (bool, int, str, type(None))


def split(tree: Any, *, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Split a tree into a JSON value that refers to tensors by name, and the tensors.

    ``name`` is the prefix of these names and of paths in errors.  Tied tensors (same memory, shape
    and strides) are stored once.  Keys of dicts may be str, int, float, bool or None.
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
        if x.numel() and not isinstance(x, DTensor):  # DTensors need equal labels on all ranks
            key = (x.data_ptr(), x.device, x.dtype, tuple(x.shape), x.stride())
        if key in seen:
            return {"tensor": seen[key]}
        while label in tensors or label == "__metadata__":  # keys 1 and "1" give the same path
            label, number = f"{'/'.join(path)}~{number}", number + 1
        tensors[label] = x
        if key is not None:
            seen[key] = label
        return {"tensor": label}

    return _encode(tree, (name,), leaf), tensors


def join(encoded: Any, tensors: Mapping[str, Any]) -> Any:
    """Restore the tree from the output of ``split``."""
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


def write_shards(folder: Path, tensors: Mapping[str, DTensor]) -> dict[str, Entry]:
    """Write sharded tensors by label; returns entries for ``stored_tensors``.  Collective."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(
        str(folder / SHARDS), fqn_to_index_mapping=_file_numbers(tensors), save_distributed=True
    )
    with _first_failure(CheckpointError, f"could not write {folder / SHARDS}"):
        save({**tensors}, storage_writer=writer)
    return {
        label: {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        for label, x in tensors.items()
    }


def stored_tensors(folder: Path, entries: Mapping[str, Entry]) -> dict[str, StoredTensor]:
    """The tensors that ``write_shards`` wrote to the checkpoint ``folder``, not read yet."""
    read = partial(_read, folder)
    return {
        label: StoredTensor(
            name=label,
            shape=torch.Size(entry["shape"]),
            dtype=getattr(torch, entry["dtype"]),
            read=read,
        )
        for label, entry in entries.items()
    }


def _read(folder: Path, pairs: Sequence[tuple[StoredTensor, Tensor]]) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    what = f"could not read {folder / SHARDS}"
    with _first_failure(DamagedCheckpointError, what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        reader = HuggingFaceStorageReader(str(folder / SHARDS))
        targets: dict[str, Any] = {stored.name: target for stored, target in pairs}
        load(targets, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _first_failure(kind: type[CheckpointError], what: str) -> Iterator[None]:
    """Context that raises the failure of any rank as ``kind``."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # a BaseException, raised on every rank
        rank, (cause, _) = min(error.failures.items())
        raise kind(f"{what}: {cause} (rank {rank})") from cause


def _file_numbers(tensors: Mapping[str, DTensor]) -> dict[str, int]:
    """The file number of each tensor, from 1."""
    files, size, number = {}, 0, 1
    for label, x in tensors.items():
        part = x.nbytes // x.device_mesh.size()
        if size and size + part > FILE_BYTES:
            size, number = 0, number + 1
        size += part
        files[label] = number
    return files
