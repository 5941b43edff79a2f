"""Converts TRL's vLLM options to those of Kedge."""

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
    **dict.fromkeys(_READ, Honored("rollout engine: converted to rollout_engine and its options")),
    "vllm_structured_outputs_regex": Refused(
        "sampling would use another distribution than training", "leave it unset"
    ),
    "vllm_group_port": Ignored("weights are sent to a server as files (weight_sync_folder)"),
}


def settle_vllm(config: Any) -> None:
    """Convert ``use_vllm`` and related options to ``rollout_engine`` and its options, in place.

    Raises:
        ConfigError: vLLM options without ``use_vllm``, or ``rollout_engine`` is set, too.
    """
    defaults = {f.name: default_of(f) for f in fields(config) if f.name in _READ}
    if not config.use_vllm:
        for name, default in defaults.items():
            if getattr(config, name) != default:
                raise ConfigError(
                    f"{name}={getattr(config, name)!r} has no effect without use_vllm=True; set"
                    " it, or use rollout_engine and vllm_engine_args"
                )
        return
    if config.rollout_engine != "embedded":
        raise ConfigError(
            f"use_vllm=True and rollout_engine={config.rollout_engine!r} are both set;"
            " set one of them"
        )
    if config.vllm_mode == "server":
        address = f"http://{config.vllm_server_host}:{config.vllm_server_port}"
        config.rollout_engine = config.vllm_server_base_url or address
        config.worker_start_timeout = config.vllm_server_timeout
    else:
        config.rollout_engine = "vllm"
        config.vllm_sleep = config.vllm_enable_sleep_mode
        engine_args = config.vllm_engine_args or {}
        engine_args = json.loads(engine_args) if isinstance(engine_args, str) else engine_args
        from_trl = {
            "gpu_memory_utilization": config.vllm_gpu_memory_utilization,
            "max_model_len": config.vllm_max_model_length,
            "model_impl": None if config.vllm_model_impl == "vllm" else config.vllm_model_impl,
        }
        config.vllm_engine_args = {k: v for k, v in from_trl.items() if v is not None} | engine_args
    for name, default in defaults.items():
        setattr(config, name, default)
