"""Slots of a cluster for the actors of one role, and pools of workers that share a batch."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kedge.ext.ray import cluster
from kedge.ext.ray.actor import Actor
from kedge.ext.ray.context import get_context
from kedge.ext.ray.placement import BundleSlot, Placement, Role, place, plan_bundles
from kedge.records.errors import ConfigError
from kedge.rollout.engines import start_all
from kedge.rollout.liveness import WorkerLimits

if TYPE_CHECKING:
    from kedge.config.rollout_engines import RolloutArguments


@dataclass(frozen=True, slots=True)
class ActorResources:
    """Slots of one role, and the function that releases them."""

    placement: Placement
    slots: Sequence[BundleSlot]
    release: Callable[[], None]


_COUNTS: Mapping[Role, str] = {  # option with the number of actors
    "engine": "vllm_num_engines",
    "reward": "ray_reward_workers",
    "reference": "ray_ref_workers",
}


def reserve(role: Role, args: RolloutArguments, *, gpus_per_engine: int = 1) -> ActorResources:
    """Slots for the actors of a config: those of ``launch``, which releases them, or new ones.

    The number of engines is for all ranks together, that of workers for each.  Outside a launch, a
    new local cluster, if none is configured, gets a CPU for each actor of any role.
    """
    option = _COUNTS[role]
    count, at = getattr(args, option), get_context()
    if at is not None and (slots := at.placement.plan.of(role)):
        each = role != "engine"
        needed = count * at.world_size if each else count
        if len(slots) != needed:
            raise ConfigError(
                f"{option}={count} needs {needed} {role} actors for {at.world_size} learners, but"
                f" launch(...) reserved {len(slots)}; set both to the same number"
            )
        first = at.rank * count if each else 0
        return ActorResources(at.placement, slots[first : first + count], lambda: None)
    engines = args.vllm_num_engines if args.rollout_engine == "ray" else 0
    cpus = engines + args.ray_reward_workers + args.ray_ref_workers
    cluster.connect(args.ray_address, cpus=cpus)
    plan = plan_bundles(
        engines=count if role == "engine" else 0,
        rewards=count if role == "reward" else 0,
        references=count if role == "reference" else 0,
        gpus=cluster.has_gpus(),
        gpus_per_engine=gpus_per_engine,
        gpus_per_reward=args.ray_reward_gpus,
        gpus_per_reference=args.ray_ref_gpus,
    )
    placement = place(plan, wait_seconds=args.ray_wait_seconds)
    return ActorResources(placement, plan.of(role), placement.release)


class SharedArgument:
    """An argument of several actors, kept in the object store until all ``readers`` have read it.

    An actor that is restarted gets it again, from ``make``.
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

    Each has an object of class ``kind``, with ``shared`` as its first argument, which is pickled
    once for all of them, and the others.
    """

    def __init__(
        self,
        role: Role,
        args: RolloutArguments,
        kind: type,
        shared: Any,
        *others: Any,
        **named: Any,
    ) -> None:
        resources, option = reserve(role, args), _COUNTS[role]
        self._release = resources.release
        try:
            argument = SharedArgument(lambda: shared, len(resources.slots))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            resources.release()
            raise ConfigError(
                f"a {role} function or model cannot be pickled for {option}: {error}; define it in"
                f" a module, or set {option}=0"
            ) from error
        makers = [
            partial(
                Actor,
                f"{role} worker {slot.index}",
                lambda handle: handle.build.remote(kind, argument.reference(), *others, **named),
                options=resources.placement.options(slot),
                limits=WorkerLimits.of(args),
            )
            for slot in resources.slots
        ]
        self.workers = start_all(makers, undo=resources.release)
        self.threads = ThreadPoolExecutor(len(self.workers), thread_name_prefix=role)

    def close(self) -> None:
        """Kill the workers and release their resources."""
        for worker in self.workers:
            worker.close()
        self.threads.shutdown(wait=True)
        self._release()
