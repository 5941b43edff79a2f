"""Sends weights to a vLLM on other GPUs over NCCL, with vLLM's weight transfer.

vLLM does the work on both sides (``vllm.distributed.weight_transfer``): packing, broadcast, loading
layer by layer.  This module decides when, what and how long to wait.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from kedge.backends.vllm.weight_payload import WeightPayload
from kedge.errors import RolloutError

T = TypeVar("T")
Control = Any  # of a vLLM during weight transfer: ``VLLMWeightSyncClient`` of vLLM


class NcclTransfer:
    """Process group of the learner and the workers of one vLLM for sending weights.

    Args:
        control: of the vLLM.
        info: of the group: vLLM's ``TrainerInitInfo`` of some backend; see ``nccl``.
        limit: seconds that creating the group, or sending all weights, may take.

    Raises:
        RolloutError: the group was not created in time.
    """

    def __init__(self, control: Control, info: Any, *, limit: float) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._source, self._limit = Source(), limit
        self._engine: Any = run_with_timeout(
            limit,
            lambda: WeightTransferTrainerFactory.trainer_init(
                info, client=control, source=self._source
            ),
            "connecting to a vLLM for weight transfer",
        )

    def send(self, payload: WeightPayload) -> None:
        """Send all weights, one at a time in the dtype of the rollout engine.

        Raises:
            RolloutError: it took too long; the group cannot be used any more.
        """
        device = payload.named[0][1].device

        def work() -> None:
            if device.type != "cuda":
                self._engine.send_weights()
                return
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # wait until the weights are computed
                self._engine.send_weights()

        self._source.payload = payload
        try:
            run_with_timeout(self._limit, work, "sending weights to a vLLM")
        finally:
            self._source.payload = WeightPayload(())

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


class Source:
    """Weights as vLLM reads them: first metadata of all, then the tensors in that order."""

    payload = WeightPayload(())

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of every weight."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        dtype = self.payload.dtype
        return [
            ParamMeta(name, dtype if dtype and x.is_floating_point() else x.dtype, tuple(x.shape))
            for name, x in self.payload.named
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.payload.tensors()


def nccl(*, address: str, workers: int) -> Any:
    """Group of this process, on its current GPU, and the GPUs of one vLLM.

    Args:
        address: of this machine, as seen from the vLLM.
        workers: GPUs of the vLLM.
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
    """
    return gpus >= 1 and all(x.is_cuda for x in weights.values())


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
    thread.join(seconds)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise RolloutError(
            f"{what} took longer than {seconds:g} s (worker_start_timeout): vLLM died or hangs."
            " NCCL cannot be interrupted, so the run must end; resume it from its latest checkpoint"
        )
    return results[0]
