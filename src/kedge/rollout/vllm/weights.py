"""Weights to send to a vLLM: the full model or a LoRA adapter, in files for its machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from kedge.errors import ConfigError, SyncError
from kedge.models.peft import is_quantized

BUCKET = 256 << 20  # bytes of weights sent at a time
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM supports


@dataclass(frozen=True, slots=True)
class WeightPayload:
    """Weights under their names in a checkpoint, and the LoRA configuration for an adapter.

    ``named`` refers to the learner's tensors; ``tensors`` converts them one at a time.
    """

    named: tuple[tuple[str, Tensor], ...]
    adapter: Any = None
    dtype: torch.dtype | None = None  # dtype of the rollout engine; None: unchanged
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # weights from the learner

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights in the dtype of the rollout engine."""
        for name, x in self.named:
            yield name, x.to(self.dtype if x.is_floating_point() else None)

    def write(self, folder: Path) -> None:
        """Write safetensors files of at most ``BUCKET`` bytes, or of one tensor, to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if self.adapter is not None:  # a single file whose name vLLM expects
                self.adapter.save_pretrained(folder)
                weights = {name: x.cpu().contiguous() for name, x in self.tensors()}
                _save(weights, folder / "adapter_model.safetensors")
                return
            for number, bucket in enumerate(buckets(self.tensors())):
                suffix = f"-{number:05}" if number else ""  # vLLM reads all files in the folder
                _save(dict(bucket), folder / f"model{suffix}.safetensors")
        except (OSError, SafetensorError) as error:
            size = sum(
                x.numel()
                * (self.dtype if self.dtype and x.is_floating_point() else x.dtype).itemsize
                for _, x in self.named
            )
            raise SyncError(
                f"weights of {size / 1e9:.2f} GB cannot be written to {folder}: {error}; set"
                " weight_sync_folder to a folder with room (shared memory is small in a container)"
            ) from error


def buckets(named: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of consecutive host tensors, ``BUCKET`` bytes in all; each is valid until the next."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, x in named:
        bucket.append((name, x.detach().cpu().contiguous()))
        size += x.nbytes
        if size >= BUCKET:
            yield bucket
            bucket.clear()  # frees it for the caller, too, before the next one exists
            size = 0
    if bucket:
        yield bucket


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    seen: set[int] = set()
    for name, x in tensors.items():  # a tied head is the same tensor
        tensors[name] = x.clone() if x.data_ptr() in seen else x
        seen.add(x.data_ptr())
    save_file(tensors, path, metadata={"format": "pt"})


def shared_memory() -> str | None:
    """This machine's shared memory as a folder; None if it has none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def get_lora_config(policy: nn.Module) -> Any:
    """Configuration of the trained LoRA adapter; None without adapter."""
    model: Any = policy
    if not hasattr(policy, "peft_config"):
        return None
    config = model.peft_config[model.active_adapter]
    kind = getattr(config.peft_type, "value", config.peft_type)
    unsupported = [
        (kind != "LORA", f"is {kind}"),
        (getattr(config, "use_dora", False), "has use_dora=True"),
        (bool(getattr(config, "modules_to_save", None)), "has modules_to_save"),
        (getattr(config, "bias", "none") != "none", "trains biases"),
        (bool(getattr(config, "target_parameters", None)), "has target_parameters"),
        (getattr(config, "r", 0) > RANKS[-1], f"has a rank above {RANKS[-1]}"),
        (is_quantized(model.get_base_model()), "has a quantized base model"),
    ]
    for applies, text in unsupported:
        if applies:
            raise ConfigError(
                f"the policy's adapter {text}, but vLLM only supports plain LoRA; use"
                " rollout_engine='embedded'"
            )
    return config


def max_lora_rank(adapter: Any) -> int:
    """The adapter's highest rank, rounded up to one that vLLM supports."""
    highest = max([adapter.r, *dict(adapter.rank_pattern or {}).values()])
    return next(r for r in RANKS if r >= highest)


def adapter_weights(weights: Mapping[str, Tensor]) -> tuple[tuple[str, Tensor], ...]:
    """Weights under their names in an adapter file, without the name of the adapter."""
    named = []
    for name, x in weights.items():
        stem, _, last = name.rpartition(".")
        named.append((f"{stem.rpartition('.')[0]}.{last}", x.detach()))
    return tuple(named)


def base_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The frozen weights under their names in the model without adapter."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): x
        for name, x in weights.items()
        if ".lora_" not in name
    }


_PREFIX = "kedge-weights-"
_NEW = 60.0  # seconds during which a folder counts as new


class WeightFolder:
    """A folder that is deleted with this object, or at the end of the process.

    A process that is killed leaves its folders, perhaps with a policy in shared memory; the next
    one that makes a folder in the same place deletes them.  Its owner holds a lock on each.
    Without ``parent`` it lies in this machine's shared memory, or in its temporary folder.
    """

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or shared_memory() or tempfile.gettempdir()
        _delete_abandoned(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.delete = weakref.finalize(self, _delete, self.path, self._lock)


def _delete(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _delete_abandoned(parent: Path) -> None:
    """Delete folders of this user on which no process holds a lock."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            about = folder.stat()
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # deleted in the meantime, or owned by another user
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A new folder has no lock yet.
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > _NEW:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, or a file system without locks
            pass
        finally:
            os.close(lock)


class WeightFiles:
    """Weight files for a machine's servers: written for the first, forgotten after the last."""

    def __init__(self, readers: int = 1, parent: str | None = None) -> None:
        self._readers, self._parent = readers, parent
        self._lock = threading.Lock()
        self._weights: object = None  # the ``WeightPayload.weights`` in the folder
        self._folder: WeightFolder | None = None
        self._left = 0

    def store(self, payload: WeightPayload) -> WeightFolder:
        """Write the weights, unless the folder holds the same ``WeightPayload.weights``."""
        with self._lock:
            if self._folder is None or payload.weights is not self._weights:
                self._folder = None
                folder = WeightFolder(self._parent)
                try:
                    payload.write(folder.path)
                except BaseException:
                    folder.delete()
                    raise
                self._weights, self._folder, self._left = payload.weights, folder, self._readers
            self._left -= 1
            folder = self._folder
            if self._left == 0:
                self._weights = self._folder = None
            return folder
