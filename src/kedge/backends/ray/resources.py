"""Room for the actors of one process: its seats in a launch, or a placement group of its own."""

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
    """Seats of one role, and how to give their room back."""

    placement: Placement
    seats: Sequence[Seat]
    release: Callable[[], None]


def from_launch(role: Role, *, count: int, option: str, each: bool = True) -> ActorResources | None:
    """The seats that a launch holds; None outside a launch, or where it holds none.

    Args:
        role: of the seats.
        count: how many there shall be.
        option: of the trainer's config, that says so.
        each: every rank has so many of its own; else all ranks together.

    Raises:
        ConfigError: the launch holds another number.
    """
    at = get_context()
    if at is None or not (seats := at.placement.plan.of(role)):
        return None
    wanted = count * at.world_size if each else count
    if len(seats) != wanted:
        raise ConfigError(
            f"the launch has {len(seats)} places for {role}s, and its {at.world_size} learners"
            f" ask for"
            f" {wanted}; give launch(...) the number that {option} has"
        )
    first = at.rank * count if each else 0
    return ActorResources(at.placement, seats[first : first + count], _nothing)


def allocate(
    role: Role, options: RolloutOptions, plan: Callable[[bool], PlacementPlan]
) -> ActorResources:
    """Room in the cluster that is named, or in one that starts here.

    Args:
        role: of the seats.
        options: where, and how long to wait.
        plan: from whether the cluster has GPUs to what is needed.

    Raises:
        ConfigError: no cluster, or no room in it.
    """
    cluster.connect(options.ray.address, cpus=options.actors)
    made = place(plan(cluster.has_gpus()), wait_seconds=options.ray.wait_seconds)
    return ActorResources(made, made.plan.of(role), made.release)


def address(options: RolloutOptions) -> str | None:
    """The cluster that is named, if one is."""
    return options.ray.address or os.environ.get("RAY_ADDRESS")


def _nothing() -> None:
    """What ``launch`` holds, it gives back itself."""
