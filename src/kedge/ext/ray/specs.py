"""The rollout engines of ``rollout_engine="ray"``, by ``ray_engine``."""

from __future__ import annotations

from typing import Any

from kedge.config.rollout_engines import (
    RAY_OPTIONS,
    VLLM_OPTIONS,
    WORKER_OPTIONS,
    RolloutEngineSpec,
)

_READS = (*WORKER_OPTIONS, *RAY_OPTIONS, "ray_engine", "vllm_num_engines")
WORKERS = "kedge.ext.ray.workers"
ENGINES = {
    "vllm": RolloutEngineSpec(
        build="kedge.ext.ray.engine:build_vllm",
        check="kedge.ext.vllm.build:check_local",
        reads=(*VLLM_OPTIONS, *_READS, "vllm_transfer"),
        vllm=True,
        actors=True,
        workers=WORKERS,
    ),
    "embedded": RolloutEngineSpec(
        build="kedge.ext.ray.engine:build_embedded", reads=_READS, actors=True, workers=WORKERS
    ),
}


def find(config: Any) -> RolloutEngineSpec:
    """The engine in each actor."""
    return ENGINES[config.ray_engine]
