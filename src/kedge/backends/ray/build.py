"""From options to engines in actors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kedge.backends.engines import SplitEngine, together
from kedge.backends.hf.rollout import check_prompts
from kedge.backends.ray import cluster
from kedge.backends.ray.actor import limits_of
from kedge.backends.ray.engine import RayEngine
from kedge.backends.ray.placement import Placement, place, plan_seats
from kedge.backends.ray.seat import here
from kedge.backends.ray.shelf import Shelf
from kedge.config.rollout import RolloutOptions
from kedge.protocols import RolloutEngine


def ray_engines(
    policy: nn.Module,
    options: RolloutOptions,
    *,
    pad_id: int,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    spare_slot: bool = False,
    chunk_rows: int = 64,
) -> RolloutEngine:
    """Engines in actors that share the rows of each batch.

    Args:
        policy: a transformers causal language model, as it is now.
        options: which engine, and its arguments.
        pad_id: fills ``Rollout.ids`` after the end of a response.
        tokenizer: needed for stop strings only.
        dtype: what the learner computes in; None is float32.
        spare_slot: leave one slot after the longest response.
        chunk_rows: rows that an embedded engine has in flight together.

    Raises:
        ConfigError: the cluster has no room, or an engine does not start.
    """
    placement, release = _room(options)
    if options.ray.engine == "embedded":
        settings = {"pad_id": pad_id, "spare_slot": spare_slot, "tokenizer": tokenizer}
        settings |= {"chunk_rows": chunk_rows, "autocast": dtype}
        return _embedded(policy, settings, options, placement, release)
    from kedge.backends.vllm.build import vllm_engine

    return vllm_engine(
        policy,
        options,
        pad_id=pad_id,
        tokenizer=tokenizer,
        dtype=dtype,
        spare_slot=spare_slot,
        starts=partial(_vllm_starts, options=options, placement=placement),
        on_close=release,
    )


def _room(options: RolloutOptions) -> tuple[Placement, Callable[[], None]]:
    """Room for the engines, and how to give it back."""
    place_of_launch = here()
    if place_of_launch is not None and place_of_launch.placement.plan.of("engine"):
        return place_of_launch.placement, _nothing
    count = options.num_engines
    cluster.connect(options.ray.address, cpus=count + options.ray.reward_workers)
    plan = plan_seats(
        engines=count,
        gpus=cluster.has_gpus(),
        gpus_per_engine=int(options.engine_args.get("tensor_parallel_size", 1)),
    )
    placement = place(plan, wait_seconds=options.ray.wait_seconds)
    return placement, placement.release


def _nothing() -> None:
    """What ``launch`` holds, it gives back itself."""


def _embedded(
    policy: nn.Module,
    settings: Mapping[str, Any],
    options: RolloutOptions,
    placement: Placement,
    release: Callable[[], None],
) -> SplitEngine:
    import ray

    seats = placement.plan.of("engine")
    model = ray.put(copy.deepcopy(policy).requires_grad_(False).cpu())
    shelf = Shelf(len(seats))
    makers = [
        partial(
            RayEngine,
            f"engine {seat.index}",
            model,
            settings,
            options=placement.options(seat),
            limits=limits_of(options),
            shelf=shelf,
        )
        for seat in seats
    ]
    config: Any = policy.config
    return SplitEngine(
        together(makers, undo=release),
        pad_id=int(settings["pad_id"]),
        check=partial(check_prompts, config=config),
        on_close=release,
    )


def _vllm_starts(
    blueprint: Any,
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    *,
    options: RolloutOptions,
    placement: Placement,
) -> list[Callable[[], Any]]:
    import ray

    from kedge.backends.ray.service import RayService

    seats = placement.plan.of("engine")
    drawn, shelf = ray.put(blueprint), Shelf(len(seats))
    first = ray.put({name: x.detach().cpu() for name, x in weights.items()})
    return [
        partial(
            RayService,
            f"engine {seat.index}",
            drawn,
            first,
            arguments,
            options=placement.options(seat),
            limits=limits_of(options),
            shelf=shelf,
        )
        for seat in seats
    ]
