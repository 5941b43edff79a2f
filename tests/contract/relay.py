"""vLLM's weight transfer with a group of its own that needs no GPU.

Everything but the group is vLLM's NCCL backend: the handshake, what is said of the weights, the
order of calls, and loading layer by layer.  Tensors go through the store where NCCL only meets.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_common import worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
)

from kedge.ext.vllm import InProcess
from kedge.ext.vllm.weights import free_port

SPOILT: list[str] = []  # weights that get lost on the way


@dataclass
class RelayInfo(NCCLTrainerInitInfo):
    backend: ClassVar[str] = "relay"


class Trainer(NCCLTrainerWeightTransferEngine):
    init_info_cls = RelayInfo

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        from concurrent.futures import ThreadPoolExecutor

        engine = cls(client=client, source=source, packed=False)
        place = {n: getattr(init_info, f"master_{n}") for n in ("address", "port")}
        worker = NCCLWeightTransferInitInfo(
            master_address=place["address"],
            master_port=place["port"],
            rank_offset=1,
            world_size=init_info.world_size,
        )
        with ThreadPoolExecutor(1) as threads:
            joined = threads.submit(client.init_weight_transfer_engine, worker_init_payload(worker))
            engine.model_update_group = group(init_info, 0)
            joined.result()
        return engine

    def _broadcast(self, source: Any, meta: Any) -> None:
        for name, x in self._checked_iter(source, meta):
            sent = torch.zeros_like(x) if name in SPOILT else x
            self.model_update_group.broadcast_obj(sent.contiguous().numpy(), src=0)

    def shutdown(self) -> None:
        self.model_update_group = None


class Worker(NCCLWeightTransferEngine):
    def init_transfer_engine(self, init_info: Any) -> None:
        self.model_update_group = group(init_info, 1)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        told = self.parse_update_info(update_info)
        for name, kind, shape in zip(told.names, told.dtype_names, told.shapes, strict=True):
            x = torch.from_numpy(self.model_update_group.broadcast_obj(None, src=0))
            assert x.dtype == getattr(torch, kind)
            assert list(x.shape) == shape
            self.model.load_weights([(name, x)])

    def shutdown(self) -> None:
        self.model_update_group = None


def group(info: Any, rank: int) -> Any:
    return StatelessProcessGroup.create(
        host=info.master_address, port=info.master_port, rank=rank, world_size=info.world_size
    )


@functools.cache
def register() -> None:
    WeightTransferEngineFactory.register_engine("relay", Worker)
    WeightTransferTrainerFactory.register_engine("relay", Trainer)


def info() -> RelayInfo:
    register()
    return RelayInfo(
        master_address="127.0.0.1", master_port=free_port(), world_size=2, packed=False, rank=0
    )


class Relayed(InProcess):
    """A vLLM that can be sent weights that way."""

    def __init__(self, spec: Any, weights: Any, engine_args: Any = None, **options: Any) -> None:
        register()
        relay = {"weight_transfer_config": {"backend": "relay"}}
        super().__init__(spec, weights, dict(engine_args or {}) | relay, **options)
