"""Builds rollout engines in Ray actors from their options."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kedge.backends.hf.rollout import check_prompts
from kedge.backends.ray.actor import actor_limits
from kedge.backends.ray.engine import RayEngine
from kedge.backends.ray.placement import PlacementPlan, plan_seats
from kedge.backends.ray.resources import ActorResources, address, allocate, from_launch
from kedge.backends.ray.weight_store import SharedWeights
from kedge.backends.rollout import ShardedEngine, start_all
from kedge.backends.vllm.nccl_transfer import Control, NcclTransfer, can_use_nccl, nccl
from kedge.config.rollout import RolloutOptions
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine

NCCL = {"backend": "nccl"}  # vLLM's weight_transfer_config


def ray_engines(
    policy: nn.Module,
    options: RolloutOptions,
    *,
    pad_id: int,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    extra_slot: bool = False,
    chunk_rows: int = 64,
    share: int | None = None,
) -> RolloutEngine:
    """Rollout engines in actors that share the rows of each batch.

    Args:
        policy: a transformers causal language model with its current weights.
        options: of the rollout engine.
        pad_id: token id that fills ``Rollout.ids`` after the end of a response.
        tokenizer: only needed for stop strings.
        dtype: precision of the learner; None is float32.
        extra_slot: leave one slot after the longest response.
        chunk_rows: rows that an embedded engine samples at a time.
        share: rank that these engines belong to; None: all ranks share them.

    Raises:
        ConfigError: the cluster lacks resources, or an engine does not start.
    """
    resources = _resources(options, share)
    if options.ray.engine == "embedded":
        settings = {"pad_id": pad_id, "extra_slot": extra_slot, "tokenizer": tokenizer}
        settings |= {"chunk_rows": chunk_rows, "autocast": dtype}
        return _embedded(policy, settings, options, resources)
    from kedge.backends.vllm.build import vllm_engine

    return vllm_engine(
        policy,
        options,
        pad_id=pad_id,
        tokenizer=tokenizer,
        dtype=dtype,
        extra_slot=extra_slot,
        starts=partial(_vllm_starts, options=options, resources=resources),
        on_close=resources.release,
    )


def _resources(options: RolloutOptions, share: int | None) -> ActorResources:
    """Resources for all engines, or for those of one rank."""
    count, option = options.num_engines, "vllm_num_engines"
    reserved = from_launch("engine", count=count, option=option, each=share is not None)
    if reserved is not None:
        return reserved
    if share is not None and address(options) is None:
        raise ConfigError(
            'rollout_schedule="as_completed" gives each learner its own engines, which must be in'
            " one cluster; set ray_address, or start the learners with kedge.backends.ray.launch"
        )

    def plan(gpus: bool) -> PlacementPlan:
        gpus_per_engine = int(options.engine_args.get("tensor_parallel_size", 1))
        return plan_seats(engines=count, gpus=gpus, gpus_per_engine=gpus_per_engine)

    return allocate("engine", options, plan)


def _embedded(
    policy: nn.Module,
    settings: Mapping[str, Any],
    options: RolloutOptions,
    resources: ActorResources,
) -> ShardedEngine:
    import ray

    model = ray.put(copy.deepcopy(policy).requires_grad_(False).cpu())
    shared_weights = SharedWeights(len(resources.seats))
    makers = [
        partial(
            RayEngine,
            f"engine {seat.index}",
            model,
            settings,
            options=resources.placement.options(seat),
            limits=actor_limits(options),
            shared_weights=shared_weights,
        )
        for seat in resources.seats
    ]
    config: Any = policy.config
    return ShardedEngine(
        start_all(makers, undo=resources.release),
        pad_id=int(settings["pad_id"]),
        check=partial(check_prompts, config=config),
        on_close=resources.release,
    )


def _vllm_starts(
    spec: Any,
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    options: RolloutOptions,
    resources: ActorResources,
) -> list[Callable[[], Any]]:
    import ray

    from kedge.backends.ray.service import RayService

    connect = _nccl_connection(weights, options, resources, adapter=spec.adapter is not None)
    arguments = dict(arguments) | ({"weight_transfer_config": NCCL} if connect else {})
    spec_ref, shared_weights = ray.put(spec), SharedWeights(len(resources.seats))
    initial_weights = ray.put({name: x.detach().cpu() for name, x in weights.items()})
    return [
        partial(
            RayService,
            f"engine {seat.index}",
            spec_ref,
            initial_weights,
            arguments,
            options=resources.placement.options(seat),
            limits=actor_limits(options),
            shared_weights=shared_weights,
            connect=connect,
        )
        for seat in resources.seats
    ]


def _nccl_connection(
    weights: Mapping[str, Tensor],
    options: RolloutOptions,
    resources: ActorResources,
    *,
    adapter: bool,
) -> Callable[[Control], NcclTransfer] | None:
    """Connects to a vLLM for transfer from GPU to GPU; None to send weights through the host.

    Raises:
        ConfigError: vllm_transfer='nccl' is set but not possible.
    """
    gpus = min(seat.gpus for seat in resources.seats)
    if options.transfer == "host" or adapter or not can_use_nccl(weights, gpus=gpus):
        if options.transfer != "nccl":
            return None
        device = next(iter(weights.values())).device.type
        raise ConfigError(
            f"vllm_transfer='nccl' needs GPUs for learner and engines, but the learner's weights"
            f" are on {device} and each engine has {gpus:g} GPUs"
            f"{', and adapters are sent as files' if adapter else ''}; set it to 'auto'"
        )
    import ray

    address = ray.util.get_node_ip_address()
    limit = options.start_timeout

    def connect(control: Control) -> NcclTransfer:
        return NcclTransfer(control, nccl(address=address, workers=int(gpus)), limit=limit)

    return connect
