"""The rollout engines of vLLM that ``rollout_engine`` can name."""

from __future__ import annotations

from kedge.config.rollout_engines import VLLM_OPTIONS, WORKER_OPTIONS, RolloutEngineSpec

IN_PROCESS = RolloutEngineSpec(
    build="kedge.ext.vllm.build:build_in_process",
    check="kedge.ext.vllm.build:check_local",
    sampler="kedge.ext.vllm.build:engine_of_model",
    reads=VLLM_OPTIONS,
    vllm=True,
    per_rank=True,
)
SERVERS = RolloutEngineSpec(
    build="kedge.ext.vllm.build:build_servers",
    check="kedge.ext.vllm.build:check_local",
    reads=(
        *(*VLLM_OPTIONS, *WORKER_OPTIONS),
        *("vllm_num_engines", "vllm_python", "weight_sync_folder"),
    ),
    vllm=True,
)
REMOTE = RolloutEngineSpec(  # any http:// address
    build="kedge.ext.vllm.build:build_remote",
    check="kedge.ext.vllm.build:check_remote",
    reads=(*WORKER_OPTIONS, "weight_sync_folder", "vllm_tolerance"),
    vllm=True,
)
