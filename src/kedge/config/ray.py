"""Options of rollout engines and workers on Ray."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kedge.config.declare import option
from kedge.config.options import installed
from kedge.config.values import SECONDS, shown
from kedge.errors import ConfigError

_ray = partial(option, acts_in="rollout engine")


@dataclass
class RayArguments:
    """Ray options of every config."""

    ray_engine: Literal["vllm", "embedded"] = _ray(
        "vllm", "Rollout engine in each actor, with rollout_engine=ray: vllm or embedded."
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Actors on Ray, their resources and how long to wait for them."""

    engine: str
    address: str | None
    reward_workers: int
    reward_gpus: float
    ref_workers: int
    ref_gpus: float
    wait_seconds: float


def ray_options(config: Any) -> RayOptions:
    """The Ray options of a config, checked.

    Raises:
        ConfigError: options without effect, or Ray is not installed.
    """
    on_ray = config.rollout_engine == "ray"
    rewards, references = config.ray_reward_workers > 0, config.ray_ref_workers > 0
    uses_ray = on_ray or rewards or references
    any_of = "rollout_engine='ray', ray_reward_workers or ray_ref_workers"
    readers = {
        "ray_engine": (on_ray, "rollout_engine='ray'"),
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
    return RayOptions(
        engine=config.ray_engine,
        address=config.ray_address,
        reward_workers=config.ray_reward_workers,
        reward_gpus=config.ray_reward_gpus,
        ref_workers=config.ray_ref_workers,
        ref_gpus=config.ray_ref_gpus,
        wait_seconds=config.ray_wait_seconds,
    )
