"""Ray resources for the actors of a rank: reserved by ``launch``, or newly allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kedge.backends.ray import cluster
from kedge.backends.ray.context import get_context
from kedge.backends.ray.placement import Placement, PlacementPlan, Role, Seat, place
from kedge.config.rollout import RolloutOptions
from kedge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ActorResources:
    """Seats of one role, and the function that releases them."""

    placement: Placement
    seats: Sequence[Seat]
    release: Callable[[], None]


def from_launch(role: Role, *, count: int, option: str, each: bool = True) -> ActorResources | None:
    """Seats reserved by ``launch``; None outside a launch, or if it reserved none.

    Args:
        role: of the seats.
        count: number of seats.
        option: of the trainer's config that sets ``count``, for messages.
        each: whether ``count`` is per rank rather than for all ranks together.

    Raises:
        ConfigError: the launch reserved another number.
    """
    at = get_context()
    if at is None or not (seats := at.placement.plan.of(role)):
        return None
    needed = count * at.world_size if each else count
    if len(seats) != needed:
        raise ConfigError(
            f"{option}={count} needs {needed} {role} actors for {at.world_size} learners, but"
            f" launch(...) reserved {len(seats)}; set both to the same number"
        )
    first = at.rank * count if each else 0
    return ActorResources(at.placement, seats[first : first + count], _keep)


def allocate(
    role: Role, options: RolloutOptions, plan: Callable[[bool], PlacementPlan]
) -> ActorResources:
    """Reserve resources on the configured cluster, or on a new local one.

    Args:
        role: of the seats.
        options: address of the cluster and timeout.
        plan: returns the plan, given whether the cluster has GPUs.

    Raises:
        ConfigError: no cluster, or it lacks resources.
    """
    cluster.connect(options.ray.address, cpus=options.actors)
    placement = place(plan(cluster.has_gpus()), wait_seconds=options.ray.wait_seconds)
    return ActorResources(placement, placement.plan.of(role), placement.release)


def address(options: RolloutOptions) -> str | None:
    """Address of the configured cluster, if any."""
    return options.ray.address or os.environ.get("RAY_ADDRESS")


def _keep() -> None:
    """``launch`` itself releases what it reserved."""
