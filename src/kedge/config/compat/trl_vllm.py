"""TRL's options of vLLM, and the options of Kedge that they become."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from kedge.config.declare import default_of
from kedge.config.options import Honored, Ignored, Refused, Support
from kedge.errors import ConfigError

_READ = (
    "use_vllm",
    "vllm_mode",
    "vllm_enable_sleep_mode",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_model_impl",
)

NEWER_VLLM: dict[str, Support] = {
    **dict.fromkeys(_READ, Honored("rollout engine: becomes rollout_engine and its options")),
    "vllm_structured_outputs_regex": Refused(
        "it would sample from another distribution than the one that is trained", "leave it unset"
    ),
    "vllm_group_port": Ignored("weights reach a server through files (weight_sync_folder)"),
}


def settle_vllm(config: Any) -> None:
    """Turn ``use_vllm`` and what belongs to it into ``rollout_engine`` and its options.

    Raises:
        ConfigError: an unknown mode, or both spellings at once.
    """
    mine = {f.name: default_of(f) for f in fields(config) if f.name in _READ}
    if not config.use_vllm:
        for name, default in mine.items():
            if getattr(config, name) != default:
                raise ConfigError(
                    f"{name}={getattr(config, name)!r} is read with use_vllm=True alone; set that,"
                    " or rollout_engine and vllm_engine_args"
                )
        return
    if config.rollout_engine != "embedded":
        raise ConfigError(
            f"use_vllm=True and rollout_engine={config.rollout_engine!r} both say what samples; set"
            " one of them"
        )
    if config.vllm_mode == "server":
        place = f"http://{config.vllm_server_host}:{config.vllm_server_port}"
        config.rollout_engine = config.vllm_server_base_url or place
        config.worker_start_timeout = config.vllm_server_timeout
    else:
        config.rollout_engine = "vllm"
        config.vllm_sleep = config.vllm_enable_sleep_mode
        given = config.vllm_engine_args or {}
        given = json.loads(given) if isinstance(given, str) else given
        theirs = {
            "gpu_memory_utilization": config.vllm_gpu_memory_utilization,
            "max_model_len": config.vllm_max_model_length,
            "model_impl": None if config.vllm_model_impl == "vllm" else config.vllm_model_impl,
        }
        config.vllm_engine_args = {k: v for k, v in theirs.items() if v is not None} | given
    for name, default in mine.items():
        setattr(config, name, default)
