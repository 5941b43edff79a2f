"""Resources of actors on a Ray cluster: bundles, their placement, and the slots of a config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from kedge.ext.ray import cluster
from kedge.records.errors import ConfigError
from kedge.trainers.launch import launch_context

if TYPE_CHECKING:
    from kedge.config.rollout_engines import RolloutArguments

Role = Literal["learner", "engine", "reward", "reference"]
COUNTS: Mapping[Role, str] = {  # option with the number of actors
    "engine": "vllm_num_engines",
    "reward": "ray_reward_workers",
    "reference": "ray_ref_workers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSlot:
    """One actor's share of a bundle."""

    role: Role
    index: int  # index among the slots of its role
    bundle: int
    gpus: float  # in addition to one CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Bundles of resources, each on one node, and the actors in each; can be sent to actors."""

    bundles: tuple[Mapping[str, float], ...]
    slots: tuple[BundleSlot, ...]
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    group: Any = None  # ray.util.placement_group.PlacementGroup, once ``place`` has reserved it

    def of(self, role: Role) -> list[BundleSlot]:
        """The slots of one role, in order."""
        return [slot for slot in self.slots if slot.role == role]

    @property
    def total(self) -> dict[str, float]:
        """Total resources of all bundles."""
        names = sorted({name for bundle in self.bundles for name in bundle})
        return {name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in names}

    def text(self) -> str:
        """One line per bundle: resources, actors, and the node once it is placed."""
        lines, nodes = [], _nodes(self.group) if self.group is not None else {}
        for i, bundle in enumerate(self.bundles):
            resources = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
            actors: dict[str, list[str]] = {}
            for slot in self.slots:
                if slot.bundle == i:
                    actors.setdefault(slot.role, []).append(str(slot.index))
            roles = "; ".join(f"{role} {', '.join(at)}" for role, at in actors.items())
            node = f"  on {nodes[i]}" if nodes else ""
            lines.append(f"  bundle {i}: {resources}  {roles}{node}")
        return "\n".join(lines)

    def options(self, slot: BundleSlot) -> dict[str, Any]:
        """Ray options of the actor in a slot."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=slot.bundle
        )
        return {"num_cpus": 1, "num_gpus": slot.gpus, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Release the resources; actors on them are killed."""
        import ray
        from ray.util import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self.group)


def _nodes(group: Any) -> dict[int, str]:
    """The address of each bundle's node."""
    import ray
    from ray.util import placement_group_table

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed = placement_group_table(group)["bundles_to_node_id"]
    return {bundle: addresses.get(node, "?") for bundle, node in placed.items()}


def plan_bundles(
    *,
    learners: Sequence[int] = (),
    engines: int = 0,
    gpus: bool = False,
    gpus_per_engine: int = 1,
    single_gpu_mode: bool = False,
    workers: Mapping[Role, tuple[int, float]] | None = None,
) -> Placement:
    """Bundles: one per node of learners, one per engine, one per worker.

    The arguments are those of ``launch``, whether the cluster has ``gpus``, and the number of
    ``workers`` of each role with the GPUs of each.
    """
    if single_gpu_mode and (sum(learners) > 1 or gpus_per_engine > 1):
        raise ConfigError(
            f"single_gpu_mode needs one learner and one GPU per engine, got {sum(learners)}"
            f" learners and {gpus_per_engine} GPUs per engine"
        )
    slots: list[BundleSlot] = []
    bundles: list[dict[str, float]] = []

    def add(role: Role, count: int, gpus_each: float, *, new_bundle: bool = True) -> None:
        if new_bundle:
            bundles.append({})
        bundle = bundles[-1]
        bundle["CPU"] = bundle.get("CPU", 0) + count
        if gpus_each * count:
            bundle["GPU"] = bundle.get("GPU", 0) + gpus_each * count
        first = sum(slot.role == role for slot in slots)
        last = len(bundles) - 1
        slots.extend(
            BundleSlot(role=role, index=index, bundle=last, gpus=gpus_each)
            for index in range(first, first + count)
        )

    sharing = 2 if learners and engines else 1
    gpu = 1.0 if gpus else 0.0
    for ranks in learners:
        add("learner", ranks, gpu / sharing if single_gpu_mode else gpu)
    for i in range(engines):
        if single_gpu_mode:
            share = math.floor(gpu / sharing / engines * 1e4) / 1e4  # Ray counts in ten-thousandths
            add("engine", 1, share, new_bundle=i == 0 and not learners)
        else:
            add("engine", 1, gpu * gpus_per_engine)
    for role, (count, gpus_each) in (workers or {}).items():
        for _ in range(count):
            add(role, 1, gpus_each)
    strategy: Literal["PACK", "SPREAD"] = "SPREAD" if len(learners) > 1 else "PACK"
    return Placement(bundles=tuple(bundles), slots=tuple(slots), strategy=strategy)


def place(plan: Placement, *, wait_seconds: float) -> Placement:
    """Reserve the resources of a plan on the cluster; an error lists those that are missing."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group([dict(b) for b in plan.bundles], strategy=plan.strategy)
    if not group.wait(timeout_seconds=wait_seconds):
        text = _missing(plan)
        remove_placement_group(group)
        raise ConfigError(
            f"the Ray cluster could not place within {wait_seconds:g} s (ray_wait_seconds)\n"
            f"{plan.text()}\n{text}\nrequest less, add nodes, or wait longer"
        )
    return replace(plan, group=group)


def _missing(plan: Placement) -> str:
    """Requested, total and free amount of each resource."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    lines = [
        f"  {name}: {needed:g} requested, {total.get(name, 0):g} in the cluster,"
        f" {free.get(name, 0):g} free{'' if needed <= free.get(name, 0) else '  <- missing'}"
        for name, needed in plan.total.items()
    ]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for i, bundle in enumerate(plan.bundles):
        if not any(all(n.get(k, 0) >= x for k, x in bundle.items()) for n in nodes):
            sizes = ", ".join(
                f"{name} {max((n.get(name, 0) for n in nodes), default=0):g}" for name in bundle
            )
            lines.append(f"  bundle {i} does not fit on any node; the largest has {sizes}")
            break
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ActorResources:
    """Slots of one role, and the function that releases them."""

    placement: Placement
    slots: Sequence[BundleSlot]
    release: Callable[[], None]


def reserve(role: Role, args: RolloutArguments, *, gpus_per_engine: int = 1) -> ActorResources:
    """Slots for the actors of a config: those of ``launch``, which releases them, or new ones.

    The number of engines is for all ranks together, that of workers for each.  Outside a launch, a
    new local cluster, if none is configured, gets a CPU for each actor of any role.
    """
    option, at = COUNTS[role], cast(Any, launch_context())
    count = getattr(args, option)
    if at is not None and (slots := at.placement.of(role)):
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
    if role == "engine":
        gpus = cluster.has_gpus()
        plan = plan_bundles(engines=count, gpus=gpus, gpus_per_engine=gpus_per_engine)
    else:
        each_gpus = args.ray_reward_gpus if role == "reward" else args.ray_ref_gpus
        plan = plan_bundles(workers={role: (count, each_gpus)})
    placement = place(plan, wait_seconds=args.ray_wait_seconds)
    return ActorResources(placement, placement.of(role), placement.release)
