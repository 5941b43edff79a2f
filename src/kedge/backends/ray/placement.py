"""Who runs where: a plan of seats, and the placement group that holds room for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kedge.errors import ConfigError

logger = logging.getLogger(__name__)
Role = Literal["learner", "engine", "reward", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One actor's share of a bundle."""

    role: Role
    index: int  # among those of its role
    bundle: int
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Bundles of resources, each on one node, and who sits in which."""

    bundles: tuple[Mapping[str, float], ...]
    seats: tuple[Seat, ...]
    strategy: Literal["PACK", "SPREAD"] = "PACK"

    def of(self, role: Role) -> list[Seat]:
        """The seats of one role, in order."""
        return [seat for seat in self.seats if seat.role == role]

    @property
    def total(self) -> dict[str, float]:
        """What all bundles ask for together."""
        names = sorted({name for bundle in self.bundles for name in bundle})
        return {name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in names}

    def text(self, nodes: Sequence[str] = ()) -> str:
        """One line per bundle: what it holds, for whom, and on which node if that is known."""
        lines = []
        for i, bundle in enumerate(self.bundles):
            held = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
            place = f"  on {nodes[i]}" if nodes else ""
            lines.append(f"  bundle {i}: {held}  {_who(self.seats, i)}{place}")
        return "\n".join(lines)


def _who(seats: Sequence[Seat], bundle: int) -> str:
    found: dict[str, list[int]] = {}
    for seat in seats:
        if seat.bundle == bundle:
            found.setdefault(seat.role, []).append(seat.index)
    return "; ".join(f"{role} {', '.join(map(str, held))}" for role, held in found.items())


def plan_seats(
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

    Args:
        learners: ranks on each node; each has a GPU of its own where there are GPUs.
        engines: rollout engines.
        rewards: reward workers.
        references: workers that hold the reference.
        gpus: whether the cluster has any.
        gpus_per_engine: of one engine.
        gpus_per_reward: of one reward worker; may be a fraction.
        gpus_per_reference: of one worker with the reference; may be a fraction.
        single_gpu_mode: learner and engines share one GPU.

    Raises:
        ConfigError: shares of one GPU that do not go together.
    """
    if single_gpu_mode and (sum(learners) > 1 or gpus_per_engine > 1):
        raise ConfigError(
            f"single_gpu_mode shares one GPU between one learner and its engines; found"
            f" {sum(learners)} learners and {gpus_per_engine} GPUs per engine"
        )
    seats: list[Seat] = []
    bundles: list[dict[str, float]] = []

    def add(role: Role, count: int, share: float, *, fresh: bool = True) -> None:
        if fresh:
            bundles.append({})
        bundle = bundles[-1]
        bundle["CPU"] = bundle.get("CPU", 0) + count
        if share * count:
            bundle["GPU"] = bundle.get("GPU", 0) + share * count
        first = sum(seat.role == role for seat in seats)
        last = len(bundles) - 1
        seats.extend(
            Seat(role=role, index=index, bundle=last, cpus=1, gpus=share)
            for index in range(first, first + count)
        )

    both = 2 if learners and engines else 1
    whole = 1.0 if gpus else 0.0
    for ranks in learners:
        add("learner", ranks, whole / both if single_gpu_mode else whole)
    for i in range(engines):
        if single_gpu_mode:
            share = math.floor(whole / both / engines * 1e4) / 1e4  # Ray counts in ten-thousandths
            add("engine", 1, share, fresh=i == 0 and not learners)
        else:
            add("engine", 1, whole * gpus_per_engine)
    for _ in range(rewards):
        add("reward", 1, gpus_per_reward)
    for _ in range(references):
        add("reference", 1, gpus_per_reference)
    strategy: Literal["PACK", "SPREAD"] = "SPREAD" if len(learners) > 1 else "PACK"
    return PlacementPlan(bundles=tuple(bundles), seats=tuple(seats), strategy=strategy)


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan for which the cluster holds room.  It can be sent to actors."""

    plan: PlacementPlan
    group: Any  # ray.util.placement_group.PlacementGroup

    def options(self, seat: Seat) -> dict[str, Any]:
        """The options of the actor that takes the seat."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=seat.bundle
        )
        return {"num_cpus": seat.cpus, "num_gpus": seat.gpus, "scheduling_strategy": where}

    def text(self) -> str:
        """The plan, with the nodes it got."""
        import ray
        from ray.util import placement_group_table

        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        table = placement_group_table(self.group)["bundles_to_node_id"]
        nodes = [address.get(table[i], "?") for i in range(len(self.plan.bundles))]
        return self.plan.text(nodes)

    def release(self) -> None:
        """Give the room back; actors in it end."""
        import ray
        from ray.util import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self.group)


def place(plan: PlacementPlan, *, wait_seconds: float) -> Placement:
    """Ask the cluster for room, and wait until it has it.

    Args:
        plan: what is needed.
        wait_seconds: most seconds to wait.

    Raises:
        ConfigError: there was not enough room in time; with what is missing.
    """
    from ray.util import placement_group, remove_placement_group

    group = placement_group([dict(b) for b in plan.bundles], strategy=plan.strategy)
    if not group.wait(timeout_seconds=wait_seconds):
        text = _missing(plan)
        remove_placement_group(group)
        raise ConfigError(
            f"the Ray cluster had no room within {wait_seconds:g} s (ray_wait_seconds) for\n"
            f"{plan.text()}\n{text}\nask for less, add nodes, or wait longer"
        )
    return Placement(plan, group)


def _missing(plan: PlacementPlan) -> str:
    """What was asked for, what there is and what is free, resource by resource."""
    import ray

    whole, free = ray.cluster_resources(), ray.available_resources()
    lines = [
        f"  {name}: {asked:g} asked for, {whole.get(name, 0):g} in the cluster,"
        f" {free.get(name, 0):g} free{'' if asked <= free.get(name, 0) else '  <- missing'}"
        for name, asked in plan.total.items()
    ]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for i, bundle in enumerate(plan.bundles):
        if not any(all(n.get(k, 0) >= x for k, x in bundle.items()) for n in nodes):
            sizes = ", ".join(
                f"{name} {max((n.get(name, 0) for n in nodes), default=0):g}" for name in bundle
            )
            lines.append(f"  bundle {i} fits on no node; the largest has {sizes}")
            break
    return "\n".join(lines)
