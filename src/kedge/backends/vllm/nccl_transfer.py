"""Weights to a vLLM on other GPUs: over NCCL, by vLLM's own weight transfer.

vLLM does the work on both sides (``vllm.distributed.weight_transfer``): packing, broadcast, loading
layer by layer.  Here is when it is asked to, with what, and for how long.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kedge.errors import RolloutError

T = TypeVar("T")


class Control(Protocol):
    """How a vLLM is told what to do with weights; see vLLM's ``VLLMWeightSyncClient``."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the group of processes that ``init_info`` names."""
        ...

    def start_weight_update(self) -> None:
        """New weights are about to come."""
        ...

    def update_weights(self, update_info: Any) -> None:
        """Receive the weights that ``update_info`` names; returns once they are loaded."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All have come."""
        ...


class NcclTransfer:
    """A group of the learner and the processes of one vLLM, over which weights are sent.

    Args:
        control: the vLLM's.
        info: how the group is made: vLLM's ``TrainerInitInfo`` of some backend; see ``nccl``.
        limit: most seconds that making the group, or sending all weights, may take.

    Raises:
        RolloutError: the group was not made in time.
    """

    def __init__(self, control: Control, info: Any, *, limit: float) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._source, self._limit = Source(), limit
        self._engine: Any = within(
            limit,
            lambda: WeightTransferTrainerFactory.trainer_init(
                info, client=control, source=self._source
            ),
            "joining a vLLM to send it weights",
        )

    def send(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Every weight under the name that a checkpoint has for it.

        Raises:
            RolloutError: it took too long; the group is of no use any more.
        """
        device = named[0][1].device

        def work() -> None:
            if device.type != "cuda":
                self._engine.send_weights()
                return
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # what made the weights is over
                self._engine.send_weights()

        self._source.named = named
        try:
            within(self._limit, work, "sending weights to a vLLM")
        finally:
            self._source.named = ()

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


class Source:
    """Weights as vLLM asks for them: what will come, and then each of it in that order."""

    named: Sequence[tuple[str, Tensor]] = ()

    def metadata(self) -> list[Any]:
        """Name, type and shape of every weight."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, x.dtype, tuple(x.shape)) for name, x in self.named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.named)


def nccl(*, address: str, workers: int) -> Any:
    """A group of this process, on the GPU it computes on, and the GPUs of one vLLM.

    Args:
        address: of this machine, as the vLLM's sees it.
        workers: GPUs of the vLLM.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        master_address=address, master_port=free_port(), world_size=1 + workers, rank=0
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def reaches(weights: Mapping[str, Tensor], *, gpus: float) -> bool:
    """Whether NCCL can take weights from where they are to a vLLM.

    It needs GPUs on both sides, and not the same one: a share of a GPU may be the learner's own.

    Args:
        weights: the learner's.
        gpus: of the vLLM.
    """
    return gpus >= 1 and all(x.is_cuda for x in weights.values())


def within(seconds: float, work: Callable[[], T], what: str) -> T:
    """``work()`` in a thread that is left behind if it takes too long: NCCL itself never gives up.

    Raises:
        RolloutError: it took longer.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again below
            failed.append(error)

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if thread.is_alive():
        raise RolloutError(
            f"{what} took longer than {seconds:g} s (worker_start_timeout): it died or hangs. NCCL"
            " cannot be interrupted, so the run has to end; it goes on from its newest checkpoint"
        )
    return found[0]
