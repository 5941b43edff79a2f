"""Ray resources for the actors of a rank: reserved by ``launch``, or newly allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge.backends.ray import cluster
from kedge.backends.ray.actor import Actor, actor_limits
from kedge.backends.ray.context import get_context
from kedge.backends.ray.placement import Placement, PlacementPlan, Role, Seat, place
from kedge.backends.rollout import start_all
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
    """Reserve a plan's resources on the configured cluster, or on a new local one.

    ``plan`` is given whether the cluster has GPUs.

    Raises:
        ConfigError: no cluster, or it lacks resources.
    """
    cluster.connect(options.ray.address, cpus=options.actors)
    placement = place(plan(cluster.has_gpus()), wait_seconds=options.ray.wait_seconds)
    return ActorResources(placement, placement.plan.of(role), placement.release)


def address(options: RolloutOptions) -> str | None:
    """Address of the configured cluster, if any."""
    return options.ray.address or os.environ.get("RAY_ADDRESS")


def reserve(
    role: Role, options: RolloutOptions, plan: PlacementPlan, *, count: int, option: str
) -> ActorResources:
    """``from_launch``, or outside a launch ``allocate``."""
    reserved = from_launch(role, count=count, option=option)
    return reserved if reserved is not None else allocate(role, options, lambda _: plan)


def _keep() -> None:
    """``launch`` itself releases what it reserved."""


class ActorPool:
    """The workers of one role, which share the rows of each batch.

    ``resources`` have a seat for each, and are released if one does not start; ``build`` is called
    with an actor's handle and starts to build the actor's object.
    """

    def __init__(
        self,
        role: Role,
        resources: ActorResources,
        options: RolloutOptions,
        build: Callable[[Any], Any],
    ) -> None:
        self._release = resources.release
        makers = [
            partial(
                Actor,
                f"{role} worker {seat.index}",
                build,
                options=resources.placement.options(seat),
                limits=actor_limits(options),
            )
            for seat in resources.seats
        ]
        self.workers = start_all(makers, undo=resources.release)
        self._threads = ThreadPoolExecutor(len(self.workers), thread_name_prefix=role)

    def submit(self, index: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of one worker's object in the background."""
        return self._threads.submit(self.workers[index].call, method, *args)

    def close(self) -> None:
        """Kill the workers and release their resources."""
        for worker in self.workers:
            worker.close()
        self._threads.shutdown(wait=True)
        self._release()
