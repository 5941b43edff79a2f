"""Builds rollout engines in Ray actors; options are named as in the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.config.rollout_engines import engine_args, installed_vllm
from kedge.errors import ConfigError
from kedge.models.fingerprint import policy_weights
from kedge.protocols import RolloutEngine
from kedge.ray.engine import HostedEngine, HostedVLLM, RayEngine, StoredWeights
from kedge.ray.placement import (
    ActorResources,
    RayCluster,
    SharedArgument,
    from_launch,
    plan_bundles,
)
from kedge.rollout.embedded.engine import check_prompts
from kedge.rollout.engines import EngineInputs, ShardedEngine, start_all
from kedge.rollout.vllm.build import build_template
from kedge.rollout.vllm.inprocess import InProcess
from kedge.rollout.vllm.nccl_transfer import (
    NCCL_SINCE,
    EngineGroup,
    FanOut,
    NcclTransfer,
    can_use_nccl,
    nccl,
)
from kedge.rollout.vllm.policy_template import PolicyTemplate, meta_model, on_cpu

NCCL = {"backend": "nccl"}  # vLLM's weight_transfer_config


def build_embedded(
    inputs: EngineInputs, *, cluster: RayCluster, vllm_num_engines: int
) -> RolloutEngine:
    """Embedded engines in actors that share the rows of each batch."""
    settings = {
        "pad_id": inputs.pad_id,
        "extra_column": inputs.extra_column,
        "tokenizer": inputs.tokenizer,
        "chunk_rows": inputs.chunk_rows,
        "autocast": inputs.dtype,
    }
    return _start(
        inputs,
        cluster,
        _resources(cluster, vllm_num_engines),
        kind=HostedEngine,
        make_model=partial(on_cpu, meta_model(inputs.policy)),
        dtype=None,
        settings=settings,
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
    """VLLM engines in actors that share the rows of each batch."""
    arguments = engine_args(vllm_engine_args, tensor_parallel_size=vllm_tensor_parallel_size)
    each = int(arguments.get("tensor_parallel_size", 1))
    resources = _resources(cluster, vllm_num_engines, gpus_per_engine=each)
    template, arguments = build_template(inputs, arguments, sleep=vllm_sleep)
    weights = policy_weights(inputs.policy)
    gpus = min(slot.gpus for slot in resources.slots)
    groups: list[EngineGroup | None] = [None] * len(resources.slots)
    adapter = template.adapter is not None
    if _uses_nccl(weights, gpus=gpus, transfer=vllm_transfer, adapter=adapter):
        arguments |= {"weight_transfer_config": NCCL}
        device, limit = next(iter(weights.values())).device, cluster.worker_start_timeout
        new = partial(_group, template, int(gpus), limit, device)
        if rollout_schedule == "in_order":
            groups = [new(shared=True)] * len(groups)
        else:
            groups = [new(shared=False) for _ in groups]
    settings = {
        "service": partial(InProcess, engine_args=arguments, shares_gpu=gpus < 1),
        "pad_id": inputs.pad_id,
        "tolerance": vllm_tolerance,
        "extra_column": inputs.extra_column,
        "sleeps": vllm_sleep,
    }
    return _start(
        inputs,
        cluster,
        resources,
        kind=HostedVLLM,
        make_model=template.on_cpu,
        dtype=template.dtype if template.adapter is None else None,
        settings=settings,
        template=template,
        groups=groups,
    )


def _start(
    inputs: EngineInputs,
    cluster: RayCluster,
    resources: ActorResources,
    *,
    make_model: Callable[[], Any],
    dtype: torch.dtype | None,
    template: PolicyTemplate | None = None,
    groups: Sequence[EngineGroup | None] | None = None,
    **named: Any,
) -> ShardedEngine:
    """Start engines in actors; for the other arguments see ``RayEngine``."""
    slots = resources.slots
    groups = groups or [None] * len(slots)
    model = SharedArgument(make_model, len(slots))
    stored = StoredWeights.put(policy_weights(inputs.policy).items(), dtype)
    makers = [
        partial(
            RayEngine,
            f"engine {slot.index}",
            model=model,
            stored=stored,
            options=resources.placement.options(slot),
            limits=cluster.limits,
            dtype=dtype,
            template=template,
            group=group,
            **named,
        )
        for slot, group in zip(slots, groups, strict=True)
    ]
    return ShardedEngine(
        start_all(makers, undo=resources.release),
        pad_id=inputs.pad_id,
        check=partial(check_prompts, config=inputs.policy.config),
        on_close=resources.release,
        send=groups[0].send if groups[0] is not None and groups[0].shared else None,
    )


def _resources(cluster: RayCluster, count: int, *, gpus_per_engine: int = 1) -> ActorResources:
    reserved = from_launch("engine", count=count, option="vllm_num_engines", each=False)
    if reserved is not None:
        return reserved
    return cluster.allocate(
        "engine",
        lambda gpus: plan_bundles(engines=count, gpus=gpus, gpus_per_engine=gpus_per_engine),
    )


def _group(
    template: PolicyTemplate, gpus: int, limit: float, device: torch.device, *, shared: bool
) -> EngineGroup:
    import ray

    address = ray.util.get_node_ip_address()

    def create(client: FanOut, engines: int) -> NcclTransfer:
        info = nccl(address=address, workers=engines * gpus)
        return NcclTransfer(client, info, limit=limit, device=device)

    return EngineGroup(create, template.payload, gpus, shared=shared)


def _uses_nccl(weights: Mapping[str, Tensor], *, gpus: float, transfer: str, adapter: bool) -> bool:
    """Whether weights are sent from GPU to GPU, not through the host."""
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
