"""Ray resources for the actors of a rank: reserved by ``launch``, or newly allocated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge.errors import ConfigError
from kedge.ray import cluster
from kedge.ray.actor import Actor, ActorLimits
from kedge.ray.context import get_context
from kedge.ray.placement import BundleSlot, Placement, PlacementPlan, Role, place
from kedge.rollout.sharded import start_all


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The cluster that the actors of a rank run on, and how long to wait for them, in seconds.

    Fields are named as in the config; ``actors`` counts all roles, and for each actor a new
    local cluster gets a CPU.
    """

    actors: int
    ray_address: str | None
    ray_wait_seconds: float
    worker_start_timeout: float
    worker_heartbeat: float
    worker_timeout: float
    rollout_timeout: float

    @property
    def limits(self) -> ActorLimits:
        """The timeouts of an actor."""
        return ActorLimits(
            start=self.worker_start_timeout,
            heartbeat=self.worker_heartbeat,
            patience=self.worker_timeout,
            call=self.rollout_timeout,
        )

    def allocate(self, role: Role, plan: Callable[[bool], PlacementPlan]) -> ActorResources:
        """Reserve a plan's resources, on a new local cluster if none is configured.

        ``plan`` is called with whether the cluster has GPUs.

        Raises:
            ConfigError: no cluster, or it lacks resources.
        """
        cluster.connect(self.ray_address, cpus=self.actors)
        placement = place(plan(cluster.has_gpus()), wait_seconds=self.ray_wait_seconds)
        return ActorResources(placement, placement.plan.of(role), placement.release)

    def reserve(
        self, role: Role, plan: PlacementPlan, *, count: int, option: str
    ) -> ActorResources:
        """``from_launch``, or outside a launch ``allocate``."""
        reserved = from_launch(role, count=count, option=option)
        return reserved if reserved is not None else self.allocate(role, lambda _: plan)


@dataclass(frozen=True, slots=True)
class ActorResources:
    """Slots of one role, and the function that releases them."""

    placement: Placement
    slots: Sequence[BundleSlot]
    release: Callable[[], None]


def from_launch(role: Role, *, count: int, option: str, each: bool = True) -> ActorResources | None:
    """Slots that ``launch`` reserved, and releases; None outside a launch, or if there are none.

    Args:
        role: role of the slots.
        count: number of slots.
        option: option of the trainer's config that sets ``count``, for messages.
        each: whether ``count`` is per rank rather than for all ranks together.

    Raises:
        ConfigError: the launch reserved another number.
    """
    at = get_context()
    if at is None or not (slots := at.placement.plan.of(role)):
        return None
    needed = count * at.world_size if each else count
    if len(slots) != needed:
        raise ConfigError(
            f"{option}={count} needs {needed} {role} actors for {at.world_size} learners, but"
            f" launch(...) reserved {len(slots)}; set both to the same number"
        )
    first = at.rank * count if each else 0
    return ActorResources(at.placement, slots[first : first + count], lambda: None)


class SharedArgument:
    """An argument of several actors, kept in the object store until each of them has read it.

    An actor that is restarted gets it again.

    Args:
        make: returns the object; it must return an equal one at any time.
        readers: number of actors.
    """

    def __init__(self, make: Callable[[], Any], readers: int) -> None:
        import ray

        self._make, self._left = make, readers
        self._reference: Any = ray.put(make())
        self._lock = threading.Lock()

    def reference(self) -> Any:
        """A ``ray.ObjectRef`` for one actor."""
        import ray

        with self._lock:
            self._left -= 1
            reference = self._reference if self._left >= 0 else ray.put(self._make())
            if self._left <= 0:
                self._reference = None
            return reference


class ActorPool:
    """The workers of one role, which share the rows of each batch.

    ``resources`` have a slot for each, and are released if one does not start; ``build`` is called
    with an actor's handle and starts to build the actor's object.
    """

    def __init__(
        self,
        role: Role,
        resources: ActorResources,
        limits: ActorLimits,
        build: Callable[[Any], Any],
    ) -> None:
        self._release = resources.release
        makers = [
            partial(
                Actor,
                f"{role} worker {slot.index}",
                build,
                options=resources.placement.options(slot),
                limits=limits,
            )
            for slot in resources.slots
        ]
        self.workers = start_all(makers, undo=resources.release)
        self.threads = ThreadPoolExecutor(len(self.workers), thread_name_prefix=role)

    def submit(self, index: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of one worker's object in the background."""
        return self.threads.submit(self.workers[index].call, method, *args)

    def close(self) -> None:
        """Kill the workers and release their resources."""
        for worker in self.workers:
            worker.close()
        self.threads.shutdown(wait=True)
        self._release()
