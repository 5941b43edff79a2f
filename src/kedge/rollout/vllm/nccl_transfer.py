"""Sends weights to vLLMs on other GPUs over NCCL, with vLLM's weight transfer.

vLLM does the work on both sides (``vllm.distributed.weight_transfer``): packing, broadcast, loading
layer by layer.  This module decides when, what and how long to wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from packaging.version import Version
from torch import Tensor

from kedge.config.rollout import installed_vllm
from kedge.errors import RolloutError
from kedge.rollout.liveness import RunningTime
from kedge.rollout.vllm.weight_payload import WeightPayload

T = TypeVar("T")
NCCL_SINCE = "0.32"  # vLLM
TransferCall = Callable[..., None]  # calls a method of vLLM's weight transfer by name


class NcclTransfer:
    """Process group of the learner and the workers of vLLMs for sending weights.

    Args:
        client: of the vLLM, or of several (``FanOut``).
        info: of the group: vLLM's ``TrainerInitInfo`` of some backend; see ``nccl``.
        limit: seconds that creating the group, or sending all weights, may take.
        device: of the learner, to which weights in host memory are moved one at a time.

    Raises:
        RolloutError: the group was not created in time.
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
        """Send all weights, one at a time in the dtype of the rollout engine.

        Raises:
            RolloutError: it took too long; the group cannot be used any more.
        """

        def work() -> None:
            with self._current_device():
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # until the weights are computed
                self._engine.send_weights()

        self._source.payload = payload
        try:
            run_with_timeout(self._limit, work, "sending weights to a vLLM")
        finally:
            self._source.payload = WeightPayload(())

    def _current_device(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which a new thread has the learner's GPU; by default it has the first."""
        on_gpu = self._device.type == "cuda"
        return torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext()

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


class EngineGroup:
    """One process group of the learner and all engines: weights are broadcast once for all.

    Every engine calls ``send`` for every version, each in a separate thread; the last one to
    arrive sends.  After ``reset`` the group is formed again for the next version.

    Args:
        engines: number of engines.
        workers: GPUs of each engine.
        create: forms the group, given the client of all engines.
        limit: seconds that forming the group and sending may take together.
    """

    def __init__(
        self,
        engines: int,
        workers: int,
        create: Callable[[FanOut], NcclTransfer],
        *,
        limit: float,
    ) -> None:
        self._workers, self._create, self._limit = workers, create, limit
        self._calls: dict[int, TransferCall] = {}  # by the identity of the engine
        self._payload = WeightPayload(())
        self._transfer: NcclTransfer | None = None
        self._error: BaseException | None = None
        self._all_here = threading.Barrier(engines, self._send)

    def send(self, engine: object, call: TransferCall, payload: WeightPayload) -> None:
        """Load the weights into this engine, together with the others.

        Raises:
            RolloutError: an engine failed; the group cannot be used any more.
        """
        self._calls[id(engine)] = call
        self._payload = payload
        try:
            self._all_here.wait(2 * self._limit)
        except threading.BrokenBarrierError:
            if self._error is not None:
                raise self._error from None
            raise RolloutError(
                f"not all of {self._all_here.parties} engines were ready to receive weights within"
                f" {2 * self._limit:g} s (worker_start_timeout); resume the run from its latest"
                " checkpoint"
            ) from None

    def fail(self, error: BaseException) -> None:
        """Raise an error of one engine in those that wait for it."""
        self._error = error
        self._all_here.abort()

    def reset(self) -> None:
        """Form the group again before the next version, since an engine was restarted."""
        self._transfer = None

    def _send(self) -> None:
        try:
            if self._transfer is None:
                calls = list(self._calls.values())
                self._transfer = self._create(FanOut(calls, self._workers))
            self._transfer.send(self._payload)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._payload = WeightPayload(())


class FanOut:
    """vLLM's weight transfer client of several engines, which are called concurrently.

    Args:
        calls: of each engine, calls a method of the transfer with keyword arguments.
        workers: GPUs of each engine, which have consecutive ranks in the group.
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
    """Weights as vLLM reads them: first metadata of all, then the tensors in that order."""

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
    """Group of this process, on its current GPU, and the GPUs of vLLMs.

    Args:
        address: of this machine, as seen from the vLLMs.
        workers: GPUs of all vLLMs.
    """
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

    Both need GPUs, and not the same one; a vLLM with a fraction of a GPU may share the learner's.
    vLLM's side of it is that of vLLM 0.32 and newer.
    """
    new = Version(installed_vllm() or NCCL_SINCE) >= Version(NCCL_SINCE)
    return new and gpus >= 1 and all(x.is_cuda for x in weights.values())


def run_with_timeout(seconds: float, work: Callable[[], T], what: str) -> T:
    """``work()`` in a thread that is abandoned after ``seconds``, since NCCL has no timeout.

    Raises:
        RolloutError: it took longer.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    clock = RunningTime()
    while thread.is_alive() and (left := seconds - clock.seconds()) > 0:
        thread.join(min(1.0, left))
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise RolloutError(
            f"{what} took longer than {seconds:g} s (worker_start_timeout): vLLM died or hangs."
            " NCCL cannot be interrupted, so the run must end; resume it from its latest checkpoint"
        )
    return results[0]
