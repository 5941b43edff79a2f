"""From options to engines in actors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
from torch import nn

from kedge.backends.engines import SplitEngine
from kedge.backends.hf.rollout import check_prompts
from kedge.backends.ray import cluster
from kedge.backends.ray.actor import Limits
from kedge.backends.ray.engine import RayEngine
from kedge.backends.ray.placement import Placement, Seat, place, plan_seats
from kedge.backends.ray.shelf import Shelf
from kedge.config.rollout import RolloutOptions


def ray_engines(
    policy: nn.Module,
    options: RolloutOptions,
    *,
    pad_id: int,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    spare_slot: bool = False,
    chunk_rows: int = 64,
) -> SplitEngine:
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
    import ray

    placement, release = _room(options)
    seats = placement.plan.of("engine")
    settings = {"pad_id": pad_id, "spare_slot": spare_slot, "tokenizer": tokenizer}
    settings |= {"chunk_rows": chunk_rows, "autocast": dtype}
    model = ray.put(copy.deepcopy(policy).requires_grad_(False).cpu())
    shelf = Shelf(len(seats))

    def make(seat: Seat) -> RayEngine:
        return RayEngine(
            f"engine {seat.index}",
            model,
            settings,
            options=placement.options(seat),
            limits=limits_of(options),
            shelf=shelf,
        )

    config: Any = policy.config
    return SplitEngine(
        together([partial(make, seat) for seat in seats], undo=release),
        pad_id=pad_id,
        check=lambda prompts, sampling: check_prompts(prompts, sampling, config),
        on_close=release,
    )


def limits_of(options: RolloutOptions) -> Limits:
    """How long to wait for an engine."""
    return Limits(
        start=options.start_timeout,
        heartbeat=options.heartbeat,
        patience=options.patience,
        call=options.timeout,
    )


def _room(options: RolloutOptions) -> tuple[Placement, Callable[[], None]]:
    """Room for the engines, and how to give it back."""
    count = options.num_engines
    cluster.connect(options.ray.address, cpus=count)
    plan = plan_seats(
        engines=count,
        gpus=cluster.has_gpus(),
        gpus_per_engine=int(options.engine_args.get("tensor_parallel_size", 1)),
    )
    placement = place(plan, wait_seconds=options.ray.wait_seconds)
    return placement, placement.release


def together(makers: list[Callable[[], Any]], *, undo: Callable[[], None]) -> list[Any]:
    """What the makers make, all at the same time; nothing of it is left if one fails."""
    with ThreadPoolExecutor(len(makers)) as threads:
        running = [threads.submit(make) for make in makers]
        wait(running)
    if any(each.exception() for each in running):
        for each in running:
            if each.exception() is None:
                each.result().close()
        undo()
    return [each.result() for each in running]


def environment(options: Mapping[str, str]) -> dict[str, Any]:
    """Environment variables as an option of actors."""
    return {"runtime_env": {"env_vars": dict(options)}}
