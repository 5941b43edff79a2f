"""Builds rollout engines in Ray actors; options are named as in the config."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from kedge.backends.hf.rollout import check_prompts
from kedge.backends.ray.engine import RayEngine
from kedge.backends.ray.placement import plan_seats
from kedge.backends.ray.resources import ActorResources, RayCluster, from_launch
from kedge.backends.ray.weight_store import SharedWeights
from kedge.backends.rollout import EngineInputs, ShardedEngine, start_all
from kedge.backends.vllm.nccl_transfer import Control, NcclTransfer, can_use_nccl, nccl
from kedge.config.rollout import engine_args
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine

NCCL = {"backend": "nccl"}  # vLLM's weight_transfer_config


def build_embedded(
    inputs: EngineInputs, *, cluster: RayCluster, vllm_num_engines: int
) -> RolloutEngine:
    """Embedded engines in actors that share the rows of each batch.

    Raises:
        ConfigError: the cluster lacks resources, or an engine does not start.
    """
    import ray

    resources = _resources(cluster, vllm_num_engines, inputs.rank)
    settings = {
        "pad_id": inputs.pad_id,
        "extra_slot": inputs.extra_slot,
        "tokenizer": inputs.tokenizer,
        "chunk_rows": inputs.chunk_rows,
        "autocast": inputs.dtype,
    }
    model = ray.put(copy.deepcopy(inputs.policy).requires_grad_(False).cpu())
    shared_weights = SharedWeights(len(resources.seats))
    makers = [
        partial(
            RayEngine,
            f"engine {seat.index}",
            model,
            settings,
            options=resources.placement.options(seat),
            limits=cluster.limits,
            shared_weights=shared_weights,
        )
        for seat in resources.seats
    ]
    config: Any = inputs.policy.config
    return ShardedEngine(
        start_all(makers, undo=resources.release),
        pad_id=inputs.pad_id,
        check=partial(check_prompts, config=config),
        on_close=resources.release,
    )


def build_vllm(
    inputs: EngineInputs,
    *,
    cluster: RayCluster,
    vllm_num_engines: int,
    vllm_engine_args: Any,
    vllm_tensor_parallel_size: int,
    vllm_sleep: bool,
    vllm_tolerance: float | None,
    vllm_transfer: str,
) -> RolloutEngine:
    """VLLM engines in actors that share the rows of each batch.

    Raises:
        ConfigError: the cluster lacks resources, or an engine does not start.
    """
    from kedge.backends.vllm import build

    arguments = engine_args(vllm_engine_args, tensor_parallel_size=vllm_tensor_parallel_size)
    gpus = int(arguments.get("tensor_parallel_size", 1))
    resources = _resources(cluster, vllm_num_engines, inputs.rank, gpus_per_engine=gpus)
    return build.build_vllm(
        inputs,
        partial(_vllm_starts, cluster=cluster, resources=resources, transfer=vllm_transfer),
        arguments=arguments,
        tolerance=vllm_tolerance,
        sleep=vllm_sleep,
        on_close=resources.release,
    )


def _resources(
    cluster: RayCluster, count: int, rank: int | None, *, gpus_per_engine: int = 1
) -> ActorResources:
    """Resources for all engines, or for those of one rank."""
    each = rank is not None
    reserved = from_launch("engine", count=count, option="vllm_num_engines", each=each)
    if reserved is not None:
        return reserved
    if each and cluster.address is None:
        raise ConfigError(
            'rollout_schedule="as_completed" gives each learner its own engines, which must be in'
            " one cluster; set ray_address, or start the learners with kedge.backends.ray.launch"
        )
    return cluster.allocate(
        "engine",
        lambda gpus: plan_seats(engines=count, gpus=gpus, gpus_per_engine=gpus_per_engine),
    )


def _vllm_starts(
    spec: Any,
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    cluster: RayCluster,
    resources: ActorResources,
    transfer: str,
) -> list[Callable[[], Any]]:
    import ray

    from kedge.backends.ray.service import RayService

    connect = _nccl_connection(
        weights,
        resources,
        transfer=transfer,
        adapter=spec.adapter is not None,
        limit=cluster.worker_start_timeout,
    )
    arguments = dict(arguments) | ({"weight_transfer_config": NCCL} if connect else {})
    spec_ref, shared_weights = ray.put(spec.on_cpu()), SharedWeights(len(resources.seats))
    initial_weights = ray.put({name: x.detach().cpu() for name, x in weights.items()})
    return [
        partial(
            RayService,
            f"engine {seat.index}",
            spec_ref,
            initial_weights,
            arguments,
            options=resources.placement.options(seat),
            limits=cluster.limits,
            shared_weights=shared_weights,
            connect=connect,
        )
        for seat in resources.seats
    ]


def _nccl_connection(
    weights: Mapping[str, Tensor],
    resources: ActorResources,
    *,
    transfer: str,
    adapter: bool,
    limit: float,
) -> Callable[[Control], NcclTransfer] | None:
    """Connects to a vLLM for transfer from GPU to GPU; None to send weights through the host.

    Raises:
        ConfigError: vllm_transfer='nccl' is set but not possible.
    """
    gpus = min(seat.gpus for seat in resources.seats)
    if transfer == "host" or adapter or not can_use_nccl(weights, gpus=gpus):
        if transfer != "nccl":
            return None
        device = next(iter(weights.values())).device.type
        raise ConfigError(
            f"vllm_transfer='nccl' needs GPUs for learner and engines, but the learner's weights"
            f" are on {device} and each engine has {gpus:g} GPUs"
            f"{', and adapters are sent as files' if adapter else ''}; set it to 'auto'"
        )
    import ray

    address = ray.util.get_node_ip_address()

    def connect(control: Control) -> NcclTransfer:
        return NcclTransfer(control, nccl(address=address, workers=int(gpus)), limit=limit)

    return connect
