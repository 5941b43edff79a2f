"""Workers of each learner, as Ray actors: they score responses, or compute the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kedge.ext.ray.pool import ActorPool
from kedge.ext.ray.reference import RayReference, ReferenceActor
from kedge.ext.ray.rewards import RayRewards, RewardActor


def build_rewards(
    args: Any,
    make: Callable[..., Any],
    models: Mapping[str, Any],
    functions: Mapping[str, Any],
    *,
    trainer_state: Callable[[], Any],
) -> RayRewards:
    """Start ``ray_reward_workers`` actors; each makes the reward source with these options."""
    pool = ActorPool("reward", args, RewardActor, make, models, functions)
    return RayRewards(pool, trainer_state=trainer_state)


def build_reference(args: Any, *parts: Any, **options: Any) -> RayReference:
    """Start ``ray_ref_workers`` actors; arguments as of `ReferenceActor`."""
    return RayReference(ActorPool("reference", args, ReferenceActor, *parts, **options))
