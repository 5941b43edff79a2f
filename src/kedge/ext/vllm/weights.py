"""Weights to send to a vLLM: the full model or a LoRA adapter, in files or over NCCL.

Over NCCL vLLM does the work on both sides (``vllm.distributed.weight_transfer``): packing,
broadcast, loading layer by layer.  This module decides when, what and how long to wait.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from kedge.background import in_thread
from kedge.models.peft import is_quantized
from kedge.records.errors import ConfigError, RolloutError, SyncError
from kedge.rollout.liveness import RunningTime

BUCKET = 256 << 20  # bytes of weights sent at a time
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM supports
_PREFIX = "kedge-weights-"
_NEW = 60.0  # seconds during which a folder counts as new
T = TypeVar("T")


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


class WeightFolder:
    """A folder that is deleted with this object, or at the end of the process.

    A process that is killed leaves its folders, perhaps with a policy in shared memory.  A live
    process holds a lock on its folders; a new process deletes folders that none has locked.
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


class NcclGroup:
    """Process group of the learner and the GPUs of engines: weights are broadcast once for all.

    It is formed for the first weights, and again after an engine was restarted or lost.  Each
    engine has ``gpus``; ``payload`` converts the learner's weights; ``address`` is that of this
    process as seen from the engines.  Forming the group, or sending all weights, may take
    ``limit`` seconds.  Weights in host memory are moved to the learner's ``device`` one at a time.
    If it is ``shared``, several engines are sent weights together.
    """

    def __init__(
        self,
        payload: Callable[[Mapping[str, Tensor]], WeightPayload],
        *,
        gpus: int,
        address: str,
        limit: float,
        device: torch.device,
        shared: bool = False,
    ) -> None:
        self.shared = shared
        self._payload, self._gpus, self._address = payload, gpus, address
        self._limit, self._device, self._source = limit, device, Source(device)
        self._members: list[Any] = []
        self._trainer: Any = None  # vLLM's side of the learner

    def send(self, engines: Sequence[Any], weights: Mapping[str, Tensor]) -> None:
        """Send the weights to these engines, which have a ``process`` and a ``transfer``."""
        members = [engine.process for engine in engines]
        if members != self._members:
            client = FanOut([engine.transfer for engine in engines], self._gpus)
            connect = partial(self.connect, client, self._gpus * len(engines))
            self._trainer = self._run(connect, "connecting to a vLLM for weight transfer")
            self._members = members
        self._source.payload = self._payload(weights)
        try:  # one weight at a time, in the dtype of the rollout engine
            self._run(self._trainer.send_weights, "sending weights to a vLLM")
        finally:
            self._source.payload = WeightPayload(())

    def connect(self, client: FanOut, workers: int) -> Any:
        """Form a group with the ``workers`` (GPUs) that the client controls."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        info = self.info(workers)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)

    def info(self, workers: int) -> Any:
        """VLLM's description of the group."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            master_address=self._address, master_port=free_port(), world_size=1 + workers, rank=0
        )

    def _run(self, work: Callable[[], T], what: str) -> T:
        def on_device() -> T:
            if self._device.type != "cuda":
                return work()
            with torch.cuda.device(self._device):  # a new thread's default is the first GPU
                torch.cuda.current_stream().synchronize()  # wait until the weights are computed
                return work()

        return run_with_timeout(self._limit, on_device, what)


class FanOut:
    """vLLM's weight transfer client of several engines, which are called concurrently.

    ``calls`` call a method of each engine's transfer with keyword arguments.  Its ``gpus`` have
    consecutive ranks in the group.
    """

    def __init__(self, calls: Sequence[Callable[..., None]], gpus: int) -> None:
        self._calls, self._gpus = calls, gpus

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the process group of ``init_info``, each engine with its ranks."""
        first = int(init_info["rank_offset"])
        offsets = [first + i * self._gpus for i in range(len(self._calls))]
        infos = [{"init_info": init_info | {"rank_offset": offset}} for offset in offsets]
        self._call_all("init_weight_transfer_engine", infos)

    def start_weight_update(self) -> None:
        """Prepare to receive weights."""
        self._call_all("start_weight_update", [{}] * len(self._calls))

    def update_weights(self, update_info: Any) -> None:
        """Receive the weights of ``update_info``."""
        self._call_all("update_weights", [{"update_info": update_info}] * len(self._calls))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish after all weights were received; ``finish_load`` sets their version."""
        self._call_all("finish_weight_update", [{}] * len(self._calls))

    def _call_all(self, method: str, arguments: Sequence[Mapping[str, Any]]) -> None:
        with ThreadPoolExecutor(len(self._calls)) as threads:
            pairs = zip(self._calls, arguments, strict=True)
            for future in [threads.submit(call, method, **named) for call, named in pairs]:
                future.result()


class Source:
    """Weights in the order that vLLM reads: metadata of all, then the tensors."""

    def __init__(self, device: torch.device) -> None:
        self.payload, self._device = WeightPayload(()), device

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of every weight."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        dtype = self.payload.dtype
        return [
            ParamMeta(name, dtype if dtype and x.is_floating_point() else x.dtype, tuple(x.shape))
            for name, x in self.payload.named
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, x.to(self._device)) for name, x in self.payload.tensors())


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def use_nccl(
    weights: Mapping[str, Tensor],
    *,
    gpus: float,
    adapter: bool,
    transfer: Literal["auto", "nccl", "host"] = "auto",
) -> bool:
    """Whether NCCL sends the learner's weights to vLLMs of ``gpus`` GPUs each.

    Both need separate GPUs; a vLLM with a fraction of a GPU may share the learner's.
    """
    can = gpus >= 1 and not adapter and all(x.is_cuda for x in weights.values())
    if transfer == "nccl" and not can:
        device = next(iter(weights.values())).device.type
        raise ConfigError(
            f"vllm_transfer='nccl' needs GPUs for learner and engines, but the learner's weights"
            f" are on {device} and each engine has {gpus:g} GPUs"
            f"{', and adapters are sent as files' if adapter else ''}; set it to 'auto'"
        )
    return can and transfer != "host"


def run_with_timeout(seconds: float, work: Callable[[], T], what: str) -> T:
    """Run ``work()`` in a thread; abandon it after ``seconds``, since NCCL has no timeout."""
    result: Future[T] = in_thread(work, "weights")
    clock = RunningTime()
    while not result.done() and (left := seconds - clock.seconds()) > 0:
        wait([result], min(1.0, left))
    if not result.done():
        raise RolloutError(
            f"{what} took longer than {seconds:g} s (worker_start_timeout): vLLM died or hangs."
            " NCCL cannot be interrupted, so the run must end; resume it from its latest checkpoint"
        )
    return result.result()
