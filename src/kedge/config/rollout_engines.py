"""The rollout engines that a config can name; the only place that knows them by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from kedge.config.values import shown
from kedge.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineSpec:
    """A rollout engine that ``rollout_engine`` can name.

    Args:
        summary: what it is, for help texts.
        build: "module:function", called with ``kedge.rollout.EngineInputs`` and the
            options of the config that its signature names.
        check: the same, called before any weights are loaded with the policy (a model, a folder or
            a hub name), the sampling parameters and the options that its signature names.
        reads: options of ``RolloutArguments`` that have an effect with this engine.
        copies_weights: it samples from a copy of the policy, which weight syncs update.
        vllm: vLLM samples.
        package: needed in this environment, unless ``vllm_python`` is set.
        actors: each engine is a Ray actor.
        per_rank: each rank that trains has an engine in its process.
    """

    summary: str
    build: str
    check: str | None = None
    reads: tuple[str, ...] = ()
    copies_weights: bool = True
    vllm: bool = False
    package: str | None = None
    actors: bool = False
    per_rank: bool = False

    @property
    def several(self) -> bool:
        """Whether several engines can share a batch."""
        return "vllm_num_engines" in self.reads


_VLLM = ("vllm_engine_args", "vllm_tensor_parallel_size", "vllm_sleep", "vllm_tolerance")
REMOTE = ("worker_start_timeout", "worker_heartbeat", "worker_timeout", "rollout_timeout")

# Engines in Ray actors are "ray" and the value of ray_engine; "http://" is any address.
ROLLOUT_ENGINES: Mapping[str, RolloutEngineSpec] = MappingProxyType(
    {
        "embedded": RolloutEngineSpec(
            summary="torch only",
            build="kedge.rollout.embedded.engine:build_embedded",
            copies_weights=False,
        ),
        "vllm": RolloutEngineSpec(
            summary="in the process of each rank",
            build="kedge.rollout.vllm.build:build_in_process",
            check="kedge.rollout.vllm.build:check_local",
            reads=_VLLM,
            vllm=True,
            package="vllm",
            per_rank=True,
        ),
        "vllm_server": RolloutEngineSpec(
            summary="a separate process",
            build="kedge.rollout.vllm.build:build_servers",
            check="kedge.rollout.vllm.build:check_local",
            reads=(*_VLLM, *REMOTE, "vllm_num_engines", "vllm_python", "weight_sync_folder"),
            vllm=True,
            package="vllm",
        ),
        "ray vllm": RolloutEngineSpec(
            summary="actors",
            build="kedge.ray.build:build_vllm",
            check="kedge.rollout.vllm.build:check_local",
            reads=(*_VLLM, *REMOTE, "vllm_num_engines", "vllm_transfer"),
            vllm=True,
            package="vllm",
            actors=True,
        ),
        "ray embedded": RolloutEngineSpec(
            summary="actors",
            build="kedge.ray.build:build_embedded",
            reads=(*REMOTE, "vllm_num_engines"),
            actors=True,
        ),
        "http://": RolloutEngineSpec(
            summary="the address of a running vLLM server",
            build="kedge.rollout.vllm.build:build_remote",
            check="kedge.rollout.vllm.build:check_remote",
            reads=(*REMOTE, "weight_sync_folder", "vllm_tolerance"),
            vllm=True,
        ),
    }
)
ENGINE_NAMES = tuple(
    dict.fromkeys(key.partition(" ")[0] for key in ROLLOUT_ENGINES if "://" not in key)
)
RAY_ENGINE_NAMES = tuple(
    key.removeprefix("ray ") for key in ROLLOUT_ENGINES if key.startswith("ray ")
)


def engines_help() -> str:
    """The help text of ``rollout_engine``."""
    summaries = {key.partition(" ")[0]: spec.summary for key, spec in ROLLOUT_ENGINES.items()}
    named = ", ".join(f"{name} ({summaries[name]})" for name in ENGINE_NAMES)
    return f"Rollout engine: {named}, or the http:// address of a running vLLM server."


def find_engine(config: Any) -> RolloutEngineSpec:
    """The engine that ``rollout_engine`` and ``ray_engine`` name.

    Raises:
        ConfigError: there is none of that name.
    """
    name = config.rollout_engine
    if not isinstance(name, str):
        raise ConfigError(
            f"rollout_engine={type(name).__name__} must be the name of an engine"
            f" ({', '.join(ENGINE_NAMES)}, or an http:// address); pass an engine object to the"
            " trainer: PPOTrainer(..., rollout_engine=engine)"
        )
    if name.startswith(("http://", "https://")):
        return ROLLOUT_ENGINES["http://"]
    if name not in ENGINE_NAMES:
        raise ConfigError(
            f"rollout_engine={shown(name)} must be one of {', '.join(map(repr, ENGINE_NAMES))}, or"
            " the http:// address of a vLLM server"
        )
    return ROLLOUT_ENGINES.get(name) or ROLLOUT_ENGINES[f"{name} {config.ray_engine}"]


def load_function(path: str) -> Any:
    """Import "module:function"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
