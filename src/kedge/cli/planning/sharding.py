"""Estimated memory of the first rank of a sharded run, which sends weights to rollout engines."""

from __future__ import annotations

from dataclasses import replace

import torch

from kedge.cli.planning.memory import ModelMemory
from kedge.cli.planning.sizes import human, sync_width
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import find_engine

RESERVE = 5 * 2.0**30  # bytes of a GPU that are left to CUDA, NCCL and fragments
GPU = 79 * 2.0**30  # bytes that 80 GB are, where this machine has no GPU to look at
_SEND = 2 * 2.0**30  # bytes of the two buffers of vLLM's broadcast from GPU to GPU
_GATHERED = ("policy", "reference", "value")  # FSDP shards these; ranks hold other models whole


def sharded_peaks(
    models: list[ModelMemory], config: OnPolicyConfig, *, ranks: int, stage: int
) -> dict[str, float]:
    """Peak memory of each phase on the first rank, in bytes.

    Args:
        models: all models of the run, unsharded, the policy first.
        config: of the run.
        ranks: number of learners.
        stage: of ZeRO: 1 and 2 leave weights gathered from the forward to the backward pass.
    """

    def gathered(model: ModelMemory) -> float:
        """Weights of a pass: at stage 3 the layer that runs and the next one, and the root."""
        if model.role not in _GATHERED:
            return 0.0
        count = model.count
        return model.weights * ((count.root + 2 * count.layer) / count.total if stage >= 3 else 1.0)

    def gradients(model: ModelMemory) -> float:
        """Gradients before they are reduced: of a layer and the root."""
        count = model.count
        whole = model.role in _GATHERED and count.trained == count.total
        return (count.root + count.layer) * 4.0 if whole else 0.0

    policy, separate = models[0], find_engine(config).copies_weights
    resident = sum(m.resident / (ranks if m.role in _GATHERED else 1) for m in models)
    sync = loading = 0.0
    if separate:
        # Weights go to the host one by one; a layer and the root come back to be verified.
        loading = (policy.count.root + policy.count.layer) * 4.0 + _SEND
        sync = max(policy.count.largest * (4.0 + sync_width(config, policy)), loading)
    meanwhile = resident + (loading if config.max_lag else 0.0)  # engines load during training
    return {
        "sampling": meanwhile + (0.0 if separate else policy.weights + policy.generation),
        "log-probabilities": meanwhile + max(gathered(m) + m.forward for m in models),
        "training": meanwhile
        + sum(gathered(m) + gradients(m) + m.training for m in models if m.count.trained),
        "weight sync": resident + sync,
    }


def verdict(
    models: list[ModelMemory], config: OnPolicyConfig, *, ranks: int, stage: int, rows: int
) -> str:
    """The peaks on the first rank, and whether they fit its GPU or which flags make them fit.

    Args:
        models: all models of the run, unsharded, the policy first.
        config: of the run.
        ranks: number of learners.
        stage: of ZeRO.
        rows: of a micro-batch (per_device_train_batch_size).
    """
    memory = GPU
    if torch.cuda.is_available():
        memory = float(torch.cuda.get_device_properties(0).total_memory)
    phases = sharded_peaks(models, config, ranks=ranks, stage=stage)
    listed = ", ".join(f"{phase} {human(x)}" for phase, x in phases.items())
    text = (
        f"peak about {human(max(phases.values()))} on the first of {ranks} GPUs at"
        f" deepspeed_stage {stage}: {listed}\n"
    )
    gpu = f"a GPU of {human(memory)}, of which {human(RESERVE)} are left to CUDA and NCCL"
    if max(phases.values()) <= memory - RESERVE:
        return f"{text}fits {gpu}"
    one_row = [replace(m, training=m.training / rows) for m in models]
    attempts = [("--deepspeed_stage 3", models)] if stage < 3 else []
    attempts += [("--per_device_train_batch_size 1", one_row)] if rows > 1 else []
    for i, (_, changed) in enumerate(attempts):
        phases = sharded_peaks(changed, config, ranks=ranks, stage=3)
        if max(phases.values()) <= memory - RESERVE:
            flags = " ".join(flag for flag, _ in attempts[: i + 1])
            return f"{text}does not fit {gpu}; set {flags}"
    return f"{text}does not fit {gpu}; use more GPUs or adapters (--use_peft)"
