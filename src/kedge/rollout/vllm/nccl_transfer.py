"""Sends weights to vLLMs on other GPUs over NCCL, with vLLM's weight transfer.

vLLM does the work on both sides (``vllm.distributed.weight_transfer``): packing, broadcast, loading
layer by layer.  This module decides when, what and how long to wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from packaging.version import Version
from torch import Tensor

from kedge.config.rollout_engines import installed_vllm
from kedge.errors import RolloutError
from kedge.rollout.liveness import RunningTime
from kedge.rollout.vllm.weights import WeightPayload

T = TypeVar("T")
NCCL_SINCE = "0.32"  # vLLM
TransferCall = Callable[..., None]  # calls a method of vLLM's weight transfer by name


class NcclTransfer:
    """Process group of the learner and the workers of vLLMs for sending weights.

    ``client`` is that of the vLLM, or of several (``FanOut``); ``info`` vLLM's ``TrainerInitInfo``
    for the group's backend, see ``nccl``.  Creating the group, or sending all weights, may take
    ``limit`` seconds.  Weights in host memory are moved to the learner's ``device`` one at a time.
    """

    def __init__(self, client: Any, info: Any, *, limit: float, device: torch.device) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._source, self._limit, self._device = Source(device), limit, device

        def connect() -> Any:
            with self._current_device():
                return WeightTransferTrainerFactory.trainer_init(
                    info, client=client, source=self._source
                )

        what = "connecting to a vLLM for weight transfer"
        self._engine: Any = run_with_timeout(limit, connect, what)

    def send(self, payload: WeightPayload) -> None:
        """Send all weights, one at a time in the dtype of the rollout engine."""

        def work() -> None:
            with self._current_device():
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # wait until the weights are computed
                self._engine.send_weights()

        self._source.payload = payload
        try:
            run_with_timeout(self._limit, work, "sending weights to a vLLM")
        finally:
            self._source.payload = WeightPayload(())

    def _current_device(self) -> contextlib.AbstractContextManager[Any]:
        """Context that selects the learner's GPU in a new thread, whose default is the first."""
        on_gpu = self._device.type == "cuda"
        return torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext()


class EngineGroup:
    """One process group of the learner and engines: weights are broadcast once for all of them.

    It is formed by ``create`` for the first weights, given the client of the engines and their
    number, and again after an engine was restarted or lost.  If it is ``shared``, several engines
    are sent weights together.
    """

    def __init__(
        self,
        create: Callable[[FanOut, int], NcclTransfer],
        payload: Callable[[Mapping[str, Tensor]], WeightPayload],
        workers: int,
        *,
        shared: bool,
    ) -> None:
        self.shared = shared
        self._create, self._payload, self._workers = create, payload, workers
        self._members: list[Any] = []
        self._transfer: NcclTransfer | None = None

    def send(self, engines: Sequence[Any], weights: Mapping[str, Tensor]) -> None:
        """Send the weights to these engines, which have a ``process`` and a ``transfer``."""
        members = [engine.process for engine in engines]
        if self._transfer is None or members != self._members:
            client = FanOut([engine.transfer for engine in engines], self._workers)
            self._transfer, self._members = self._create(client, len(engines)), members
        self._transfer.send(self._payload(weights))


class FanOut:
    """vLLM's weight transfer client of several engines, which are called concurrently.

    ``calls`` call a method of each engine's transfer with keyword arguments.  Its ``workers``
    (GPUs) have consecutive ranks in the group.
    """

    def __init__(self, calls: Sequence[TransferCall], workers: int) -> None:
        self._calls, self._workers = calls, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the process group of ``init_info``, each engine with its ranks."""
        first = int(init_info["rank_offset"])
        offsets = [first + i * self._workers for i in range(len(self._calls))]
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


def nccl(*, address: str, workers: int) -> Any:
    """A group of this process, at ``address`` as seen from the vLLMs, and of all their GPUs."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        master_address=address, master_port=free_port(), world_size=1 + workers, rank=0
    )


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def can_use_nccl(weights: Mapping[str, Tensor], *, gpus: float) -> bool:
    """Whether NCCL can send the learner's weights to a vLLM with ``gpus`` GPUs.

    Both need separate GPUs; a vLLM with a fraction of a GPU may share the learner's.
    Requires vLLM 0.32 or newer.
    """
    new = Version(installed_vllm() or NCCL_SINCE) >= Version(NCCL_SINCE)
    return new and gpus >= 1 and all(x.is_cuda for x in weights.values())


def run_with_timeout(seconds: float, work: Callable[[], T], what: str) -> T:
    """Run ``work()`` in a thread; abandon it after ``seconds``, since NCCL has no timeout."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised again below
            result.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    clock = RunningTime()
    while not result.done() and (left := seconds - clock.seconds()) > 0:
        wait([result], min(1.0, left))
    if not result.done():
        raise RolloutError(
            f"{what} took longer than {seconds:g} s (worker_start_timeout): vLLM died or hangs."
            " NCCL cannot be interrupted, so the run must end; resume it from its latest checkpoint"
        )
    return result.result()
