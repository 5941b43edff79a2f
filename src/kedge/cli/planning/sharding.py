"""Estimated memory of the first rank of a sharded run, which sends weights to rollout engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kedge.cli.planning.memory import Need
from kedge.cli.planning.sizes import human, sync_width
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import find_engine

RESERVE = 5 * 2.0**30  # bytes of a GPU that are left to CUDA, NCCL and fragments
GPU = 79 * 2.0**30  # bytes that 80 GB are, where this machine has no GPU to look at
_SEND = 2 * 2.0**30  # bytes of the two buffers of vLLM's broadcast from GPU to GPU
_WHOLE = ("value head", "reward", "reward adapter")  # every rank holds these


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Parameters that FSDP gathers at a time."""

    layer: int  # of the largest layer
    root: int  # outside of layers: embedding and head, unsharded from forward to backward
    largest: int  # of the largest weight, gathered alone for rollout engines


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a run is sharded, and whether its first rank sends weights to rollout engines.

    Args:
        stage: of ZeRO: 1 and 2 leave weights gathered from the forward to the backward pass.
        ranks: number of learners.
        separate: rollout engines have their own devices, and are sent weights.
        width: bytes of a weight as it is sent.
        max_lag: above 0, engines load weights while training continues.
    """

    stage: Literal[1, 2, 3]
    ranks: int
    separate: bool = False
    width: float = 4.0
    max_lag: int = 0


def read_sharding(config: OnPolicyConfig, ranks: int, policy: Need) -> Sharding | None:
    """How the flags shard a run; None if they do not say it, or shard nothing."""
    if not isinstance(config, AsyncPPOConfig) or ranks == 1 or not config.deepspeed_stage:
        return None
    engine = find_engine(config)
    stages: dict[int, Literal[1, 2, 3]] = {1: 1, 2: 2}
    return Sharding(
        stage=stages.get(config.deepspeed_stage, 3),
        ranks=ranks,
        separate=engine.copies_weights,
        width=sync_width(config, policy),
        max_lag=config.max_lag,
    )


def count_units(config: Any, *, head: str) -> Units:
    """The units of a model that is never built; arguments as of ``count_parameters``."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.modeling_layers import GradientCheckpointingLayer

    auto: Any = AutoModelForCausalLM if head == "causal" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto.from_config(config)

    def size(module: Any) -> int:
        return sum(p.numel() for p in module.parameters())

    layers = [size(m) for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return Units(
        layer=max(layers, default=0),
        root=size(model) - sum(layers),
        largest=max(p.numel() for p in model.parameters()),
    )


def sharded_peaks(
    needs: list[Need], units: dict[str, Units], sharding: Sharding
) -> dict[str, float]:
    """Peak memory of each phase on the first rank, in bytes.

    Args:
        needs: of all models, unsharded.
        units: of the models that are sharded, by role.
        sharding: of the run.
    """

    def gathered(need: Need) -> float:
        """Weights of a pass: at stage 3 the layer that runs and the next one, and the root."""
        if (unit := units.get(need.role)) is None:
            return 0.0
        share = (unit.root + 2 * unit.layer) / need.parameters if sharding.stage == 3 else 1.0
        return share * need.weights

    def gradients(need: Need) -> float:
        """Gradients before they are reduced: of a layer and the root."""
        unit = units.get(need.role)
        if unit is None or need.trained < need.parameters:
            return 0.0
        return (unit.root + unit.layer) * 4.0

    policy = needs[0]
    resident = sum(n.resident / (1 if n.role in _WHOLE else sharding.ranks) for n in needs)
    sampling = 0.0 if sharding.separate else policy.weights + policy.generation
    sync = loading = 0.0
    if sharding.separate and (unit := units.get("policy")) is not None:
        # Weights go to the host one by one; a layer and the root come back to be verified.
        loading = (unit.root + unit.layer) * 4.0 + _SEND
        sync = max(unit.largest * (4.0 + sharding.width), loading)
    meanwhile = loading if sharding.max_lag else 0.0
    return {
        "sampling": resident + meanwhile + sampling,
        "log-probabilities": resident + meanwhile + max(gathered(n) + n.forward for n in needs),
        "training": resident
        + meanwhile
        + sum(gathered(n) + gradients(n) + n.training for n in needs if n.trained),
        "weight sync": resident + sync,
    }


def gpu_bytes() -> float:
    """Memory of this machine's GPU, or of one that is sold as 80 GB."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return GPU


def verdict(needs: list[Need], units: dict[str, Units], sharding: Sharding, rows: int) -> str:
    """The peaks on the first rank, and whether they fit its GPU or what makes them fit.

    Args:
        needs: of all models, unsharded.
        units: of the models that are sharded, by role.
        sharding: of the run.
        rows: of a micro-batch (per_device_train_batch_size).
    """
    phases = sharded_peaks(needs, units, sharding)
    limit = gpu_bytes() - RESERVE
    text = (
        f"peak about {human(max(phases.values()))} on the first of {sharding.ranks} GPUs at"
        f" deepspeed_stage {sharding.stage}:"
        f" {', '.join(f'{phase} {human(x)}' for phase, x in phases.items())}\n"
    )
    gpu = f"a GPU of {human(gpu_bytes())}, of which {human(RESERVE)} are left to CUDA and NCCL"
    if max(phases.values()) <= limit:
        return f"{text}fits {gpu}"
    flags = flags_that_fit(needs, units, sharding, rows, limit)
    way_out = "use more GPUs or adapters (--use_peft)"
    return f"{text}does not fit {gpu}; {f'set {flags}' if flags else way_out}"


def flags_that_fit(
    needs: list[Need], units: dict[str, Units], sharding: Sharding, rows: int, limit: float
) -> str:
    """The flags with which a run needs at most ``limit`` bytes; empty if there are none."""
    smaller = [replace(n, training=n.training / rows) for n in needs]
    shards = replace(sharding, stage=3)
    flags = []
    for flag, layout, changed in (
        ("--deepspeed_stage 3", shards, needs),
        ("--per_device_train_batch_size 1", shards, smaller),
    ):
        if (layout, changed) != (sharding, needs):
            flags.append(flag)
            if max(sharded_peaks(changed, units, layout).values()) <= limit:
                return " ".join(flags)
        sharding, needs = layout, changed
    return ""
