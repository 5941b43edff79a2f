"""Resources of actors on a Ray cluster: a plan of bundles, and their placement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kedge.records.errors import ConfigError

if TYPE_CHECKING:
    pass

Role = Literal["learner", "engine", "reward", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSlot:
    """One actor's share of a bundle."""

    role: Role
    index: int  # index among the slots of its role
    bundle: int
    gpus: float  # in addition to one CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Bundles of resources, each on one node, and the actors in each."""

    bundles: tuple[Mapping[str, float], ...]
    slots: tuple[BundleSlot, ...]
    strategy: Literal["PACK", "SPREAD"] = "PACK"

    def of(self, role: Role) -> list[BundleSlot]:
        """The slots of one role, in order."""
        return [slot for slot in self.slots if slot.role == role]

    @property
    def total(self) -> dict[str, float]:
        """Total resources of all bundles."""
        names = sorted({name for bundle in self.bundles for name in bundle})
        return {name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in names}

    def text(self, nodes: Sequence[str] = ()) -> str:
        """One line per bundle: resources, actors, and the node if it is known."""
        lines = []
        for i, bundle in enumerate(self.bundles):
            resources = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
            node = f"  on {nodes[i]}" if nodes else ""
            lines.append(f"  bundle {i}: {resources}  {_actors(self.slots, i)}{node}")
        return "\n".join(lines)


def _actors(slots: Sequence[BundleSlot], bundle: int) -> str:
    indices: dict[str, list[int]] = {}
    for slot in slots:
        if slot.bundle == bundle:
            indices.setdefault(slot.role, []).append(slot.index)
    return "; ".join(f"{role} {', '.join(map(str, i))}" for role, i in indices.items())


def plan_bundles(
    *,
    learners: Sequence[int] = (),
    engines: int = 0,
    rewards: int = 0,
    references: int = 0,
    gpus: bool = False,
    gpus_per_engine: int = 1,
    gpus_per_reward: float = 0.0,
    gpus_per_reference: float = 0.0,
    single_gpu_mode: bool = False,
) -> PlacementPlan:
    """Bundles: one per node of learners, one per engine, one per worker.

    The arguments are those of ``launch``, and whether the cluster has ``gpus``.
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
    for _ in range(rewards):
        add("reward", 1, gpus_per_reward)
    for _ in range(references):
        add("reference", 1, gpus_per_reference)
    strategy: Literal["PACK", "SPREAD"] = "SPREAD" if len(learners) > 1 else "PACK"
    return PlacementPlan(bundles=tuple(bundles), slots=tuple(slots), strategy=strategy)


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan with reserved resources on the cluster; can be sent to actors."""

    plan: PlacementPlan
    group: Any  # ray.util.placement_group.PlacementGroup

    def options(self, slot: BundleSlot) -> dict[str, Any]:
        """Ray options of the actor in a slot."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=slot.bundle
        )
        return {"num_cpus": 1, "num_gpus": slot.gpus, "scheduling_strategy": strategy}

    def text(self) -> str:
        """The plan with the nodes of its bundles."""
        import ray
        from ray.util import placement_group_table

        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        table = placement_group_table(self.group)["bundles_to_node_id"]
        nodes = [addresses.get(table[i], "?") for i in range(len(self.plan.bundles))]
        return self.plan.text(nodes)

    def release(self) -> None:
        """Release the resources; actors on them are killed."""
        import ray
        from ray.util import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self.group)


def place(plan: PlacementPlan, *, wait_seconds: float) -> Placement:
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
    return Placement(plan, group)


def _missing(plan: PlacementPlan) -> str:
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
