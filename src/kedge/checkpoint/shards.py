"""Sharded tensors of a checkpoint: each rank writes and reads its own shards.

They are safetensors files in the folder ``shards``, written by torch.distributed.checkpoint, and
can be read with any number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.errors import CheckpointError, DamagedCheckpointError
from kedge.types import StoredTensor

FOLDER = "shards"
FILE_BYTES = 1 << 26  # of a file of one rank, which is assembled in memory

Entry = Mapping[str, Any]


def write_shards(folder: Path, tensors: Mapping[str, DTensor]) -> dict[str, Entry]:
    """Write sharded tensors.  Collective.

    Args:
        folder: the checkpoint.
        tensors: by label, the same on all ranks.

    Returns:
        label -> entry for ``stored_tensors``, as JSON.

    Raises:
        CheckpointError: a rank could not write.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(
        str(folder / FOLDER), fqn_to_index_mapping=_files(tensors), save_distributed=True
    )
    with _first_failure(CheckpointError, f"could not write {folder / FOLDER}"):
        save({**tensors}, storage_writer=writer)
    return {
        label: {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        for label, x in tensors.items()
    }


def stored_tensors(folder: Path, entries: Mapping[str, Entry]) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint ``folder`` that ``write_shards`` wrote, not read yet."""
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

    what = f"could not read {folder / FOLDER}"
    with _first_failure(DamagedCheckpointError, what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        reader = HuggingFaceStorageReader(str(folder / FOLDER))
        targets: dict[str, Any] = {stored.name: target for stored, target in pairs}
        load(targets, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _first_failure(kind: type[CheckpointError], what: str) -> Iterator[None]:
    """Context in which the failure of any rank, or of the only one, is raised as ``kind``."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # a BaseException, raised on every rank
        rank, (cause, _) = min(error.failures.items())
        raise kind(f"{what}: {cause} (rank {rank})") from cause


def _files(tensors: Mapping[str, DTensor]) -> dict[str, int]:
    """The number of each tensor's file, from 1."""
    files, size, number = {}, 0, 1
    for label, x in tensors.items():
        part = x.nbytes // x.device_mesh.size()
        if size and size + part > FILE_BYTES:
            size, number = 0, number + 1
        size += part
        files[label] = number
    return files
