"""Builds rollout engines in Ray actors; options are named as in the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.config.rollout import engine_args, installed_vllm
from kedge.errors import ConfigError
from kedge.models.fingerprint import policy_weights
from kedge.protocols import RolloutEngine
from kedge.ray.engine import RayEngine
from kedge.ray.placement import plan_bundles
from kedge.ray.resources import ActorResources, RayCluster, SharedArgument, from_launch
from kedge.ray.weight_store import SharedWeights
from kedge.rollout.embedded.engine import check_prompts
from kedge.rollout.sharded import EngineInputs, ShardedEngine, start_all
from kedge.rollout.vllm.nccl_transfer import (
    NCCL_SINCE,
    EngineGroup,
    FanOut,
    NcclTransfer,
    can_use_nccl,
    nccl,
)
from kedge.rollout.vllm.policy_template import meta_model, on_cpu
from kedge.rollout.vllm.weight_payload import WeightPayload

NCCL = {"backend": "nccl"}  # vLLM's weight_transfer_config


def build_embedded(
    inputs: EngineInputs, *, cluster: RayCluster, vllm_num_engines: int
) -> RolloutEngine:
    """Embedded engines in actors that share the rows of each batch.

    Raises:
        ConfigError: the cluster lacks resources, or an engine does not start.
    """
    resources = _resources(cluster, vllm_num_engines, inputs.rank)
    settings = {
        "pad_id": inputs.pad_id,
        "extra_slot": inputs.extra_slot,
        "tokenizer": inputs.tokenizer,
        "chunk_rows": inputs.chunk_rows,
        "autocast": inputs.dtype,
    }
    model = SharedArgument(partial(on_cpu, meta_model(inputs.policy)), len(resources.slots))
    payload = WeightPayload((), weights=policy_weights(inputs.policy))
    shared_weights = SharedWeights(len(resources.slots))
    makers = [
        partial(
            RayEngine,
            f"engine {slot.index}",
            model,
            payload,
            settings,
            options=resources.placement.options(slot),
            limits=cluster.limits,
            shared_weights=shared_weights,
        )
        for slot in resources.slots
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
    rollout_schedule: str,
) -> RolloutEngine:
    """VLLM engines in actors that share the rows of each batch.

    Raises:
        ConfigError: the cluster lacks resources, or an engine does not start.
    """
    from kedge.rollout.vllm import build

    arguments = engine_args(vllm_engine_args, tensor_parallel_size=vllm_tensor_parallel_size)
    gpus = int(arguments.get("tensor_parallel_size", 1))
    resources = _resources(cluster, vllm_num_engines, inputs.rank, gpus_per_engine=gpus)
    return build.build_vllm(
        inputs,
        partial(
            _vllm_starts,
            cluster=cluster,
            resources=resources,
            transfer=vllm_transfer,
            together=rollout_schedule == "in_order",
        ),
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
            " one cluster; set ray_address, or start the learners with kedge.ray.launch"
        )
    return cluster.allocate(
        "engine",
        lambda gpus: plan_bundles(engines=count, gpus=gpus, gpus_per_engine=gpus_per_engine),
    )


def _vllm_starts(
    spec: Any,
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    cluster: RayCluster,
    resources: ActorResources,
    transfer: str,
    together: bool,
) -> list[Callable[[], Any]]:
    """``together``: all engines load the same versions at the same time."""
    from kedge.ray.service import RayService

    slots = resources.slots
    gpus = min(slot.gpus for slot in slots)
    groups: list[EngineGroup | None] = [None] * len(slots)
    if _uses_nccl(weights, gpus=gpus, transfer=transfer, adapter=spec.adapter is not None):
        arguments = dict(arguments) | {"weight_transfer_config": NCCL}
        limit = cluster.worker_start_timeout
        device = next(iter(weights.values())).device
        if together:
            groups = [_group(len(slots), int(gpus), limit, device)] * len(slots)
        else:
            groups = [_group(1, int(gpus), limit, device) for _ in slots]
    shared_spec = SharedArgument(spec.on_cpu, len(slots))
    payload = spec.payload(weights)
    shared_weights = SharedWeights(len(slots), payload.dtype)
    return [
        partial(
            RayService,
            f"engine {slot.index}",
            shared_spec,
            payload,
            arguments,
            options=resources.placement.options(slot),
            limits=cluster.limits,
            shared_weights=shared_weights,
            group=group,
        )
        for slot, group in zip(slots, groups, strict=True)
    ]


def _group(engines: int, gpus: int, limit: float, device: torch.device) -> EngineGroup:
    import ray

    address = ray.util.get_node_ip_address()

    def create(client: FanOut) -> NcclTransfer:
        info = nccl(address=address, workers=engines * gpus)
        return NcclTransfer(client, info, limit=limit, device=device)

    return EngineGroup(engines, gpus, create, limit=limit)


def _uses_nccl(weights: Mapping[str, Tensor], *, gpus: float, transfer: str, adapter: bool) -> bool:
    """Whether weights are sent from GPU to GPU, not through the host.

    Raises:
        ConfigError: vllm_transfer='nccl' is set but not possible.
    """
    if transfer != "host" and not adapter and can_use_nccl(weights, gpus=gpus):
        return True
    if transfer != "nccl":
        return False
    device = next(iter(weights.values())).device.type
    raise ConfigError(
        f"vllm_transfer='nccl' needs vLLM {NCCL_SINCE} and GPUs for learner and engines, but the"
        f" installed vLLM is {installed_vllm() or 'missing'}, the learner's weights"
        f" are on {device} and each engine has {gpus:g} GPUs"
        f"{', and adapters are sent as files' if adapter else ''}; set it to 'auto'"
    )
