"""Options of rollout engines and workers on Ray."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from kedge.config.declare import option
from kedge.config.options import installed
from kedge.config.rollout_engines import RAY_ENGINE_NAMES, RolloutEngineSpec
from kedge.config.values import SECONDS, shown
from kedge.errors import ConfigError

_ray = partial(option, acts_in="rollout engine")

if TYPE_CHECKING:
    RayEngineName = str
else:
    RayEngineName = Literal[RAY_ENGINE_NAMES]


@dataclass
class RayArguments:
    """Ray options of every config."""

    ray_engine: RayEngineName = _ray(
        "vllm",
        "Rollout engine in each actor, with rollout_engine=ray: "
        + " or ".join(RAY_ENGINE_NAMES)
        + ".",
    )
    ray_address: str | None = _ray(
        None,
        "Address of a running Ray cluster. Unset: RAY_ADDRESS, or a new local cluster.",
        resume="may_change",
    )
    ray_reward_workers: int = _ray(
        0, "Actors per learner that score responses; 0 scores in the learner's process.", ge=0
    )
    ray_reward_gpus: float = _ray(
        0.0, "GPUs per reward worker, for reward models; may be a fraction.", ge=0
    )
    ray_ref_workers: int = _ray(
        0,
        "Actors per learner that compute the reference's log-probabilities; 0 computes them in the"
        " learner's process.",
        ge=0,
    )
    ray_ref_gpus: float = _ray(0.0, "GPUs per reference worker; may be a fraction.", ge=0)
    ray_wait_seconds: float = _ray(
        300.0,
        "Seconds to wait until the Ray cluster can place all actors.",
        gt=0,
        le=SECONDS,
        resume="may_change",
    )


def check_ray(config: Any, engine: RolloutEngineSpec) -> None:
    """Check the Ray options of a config with this rollout engine.

    Raises:
        ConfigError: options without effect, or Ray is not installed.
    """
    rewards, references = config.ray_reward_workers > 0, config.ray_ref_workers > 0
    uses_ray = engine.actors or rewards or references
    any_of = "rollout_engine='ray', ray_reward_workers or ray_ref_workers"
    readers = {
        "ray_engine": (engine.actors, "rollout_engine='ray'"),
        "ray_reward_gpus": (rewards, "ray_reward_workers"),
        "ray_ref_gpus": (references, "ray_ref_workers"),
        "ray_address": (uses_ray, any_of),
        "ray_wait_seconds": (uses_ray, any_of),
    }
    for name, (read, reader) in readers.items():
        value = getattr(config, name)
        if not read and value != RayArguments.__dataclass_fields__[name].default:
            raise ConfigError(f"{name}={shown(value)} has no effect without {reader}; leave it out")
    if uses_ray and not installed("ray"):
        raise ConfigError(
            f"rollout_engine={config.rollout_engine!r} with"
            f" ray_reward_workers={config.ray_reward_workers} and"
            f" ray_ref_workers={config.ray_ref_workers} needs Ray: pip install 'kedge[ray]'"
        )
