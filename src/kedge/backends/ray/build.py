"""From options to engines in actors."""

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
from kedge.backends.vllm.nccl_transfer import Control, NcclTransfer, nccl, reaches
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
    """Engines in actors that share the rows of each batch.

    Args:
        policy: a transformers causal language model, as it is now.
        options: which engine, and its arguments.
        pad_id: fills ``Rollout.ids`` after the end of a response.
        tokenizer: needed for stop strings only.
        dtype: what the learner computes in; None is float32.
        extra_slot: leave one slot after the longest response.
        chunk_rows: rows that an embedded engine has in flight together.
        share: the rank whose engines these are; None: they are of all ranks.

    Raises:
        ConfigError: the cluster has no room, or an engine does not start.
    """
    room = _room(options, share)
    if options.ray.engine == "embedded":
        settings = {"pad_id": pad_id, "extra_slot": extra_slot, "tokenizer": tokenizer}
        settings |= {"chunk_rows": chunk_rows, "autocast": dtype}
        return _embedded(policy, settings, options, room)
    from kedge.backends.vllm.build import vllm_engine

    return vllm_engine(
        policy,
        options,
        pad_id=pad_id,
        tokenizer=tokenizer,
        dtype=dtype,
        extra_slot=extra_slot,
        starts=partial(_vllm_starts, options=options, room=room),
        on_close=room.release,
    )


def _room(options: RolloutOptions, share: int | None) -> ActorResources:
    """Room for engines: all of them, or those of one rank."""
    count, option = options.num_engines, "vllm_num_engines"
    found = from_launch("engine", count=count, option=option, each=share is not None)
    if found is not None:
        return found
    if share is not None and address(options) is None:
        raise ConfigError(
            'rollout_schedule="as_completed" gives each learner its own engines, which have to be'
            " in one cluster: name it in ray_address, or start the learners with"
            " kedge.backends.ray.launch"
        )

    def plan(gpus: bool) -> PlacementPlan:
        each = int(options.engine_args.get("tensor_parallel_size", 1))
        return plan_seats(engines=count, gpus=gpus, gpus_per_engine=each)

    return allocate("engine", options, plan)


def _embedded(
    policy: nn.Module,
    settings: Mapping[str, Any],
    options: RolloutOptions,
    room: ActorResources,
) -> ShardedEngine:
    import ray

    model = ray.put(copy.deepcopy(policy).requires_grad_(False).cpu())
    shelf = SharedWeights(len(room.seats))
    makers = [
        partial(
            RayEngine,
            f"engine {seat.index}",
            model,
            settings,
            options=room.placement.options(seat),
            limits=actor_limits(options),
            shelf=shelf,
        )
        for seat in room.seats
    ]
    config: Any = policy.config
    return ShardedEngine(
        start_all(makers, undo=room.release),
        pad_id=int(settings["pad_id"]),
        check=partial(check_prompts, config=config),
        on_close=room.release,
    )


def _vllm_starts(
    blueprint: Any,
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    options: RolloutOptions,
    room: ActorResources,
) -> list[Callable[[], Any]]:
    import ray

    from kedge.backends.ray.service import RayService

    wire = _wire(weights, options, room, adapter=blueprint.adapter is not None)
    arguments = dict(arguments) | ({"weight_transfer_config": NCCL} if wire else {})
    drawn, shelf = ray.put(blueprint), SharedWeights(len(room.seats))
    first = ray.put({name: x.detach().cpu() for name, x in weights.items()})
    return [
        partial(
            RayService,
            f"engine {seat.index}",
            drawn,
            first,
            arguments,
            options=room.placement.options(seat),
            limits=actor_limits(options),
            shelf=shelf,
            wire=wire,
        )
        for seat in room.seats
    ]


def _wire(
    weights: Mapping[str, Tensor], options: RolloutOptions, room: ActorResources, *, adapter: bool
) -> Callable[[Control], NcclTransfer] | None:
    """How weights get to each vLLM from GPU to GPU, where that can be.

    Raises:
        ConfigError: it was asked for, and cannot be.
    """
    gpus = min(seat.gpus for seat in room.seats)
    if options.transfer == "host" or adapter or not reaches(weights, gpus=gpus):
        if options.transfer != "nccl":
            return None
        where = next(iter(weights.values())).device.type
        raise ConfigError(
            f"vllm_transfer='nccl' sends weights from GPU to GPU, and the learner's are on {where}"
            f" and each engine has {gpus:g} GPUs"
            f"{', and an adapter is sent as a file' if adapter else ''}; set it to 'auto'"
        )
    import ray

    address = ray.util.get_node_ip_address()
    limit = options.start_timeout

    def connect(control: Control) -> NcclTransfer:
        return NcclTransfer(control, nccl(address=address, workers=int(gpus)), limit=limit)

    return connect
