"""Builds the rollout engine of a run."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from kedge.algorithms import Algorithm
from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.backends.hf.sharding import sharding_strategy
from kedge.backends.rollout import build_shared_engine
from kedge.config.correction import HIGH
from kedge.config.resolve import RunSettings
from kedge.config.rollout import RolloutOptions
from kedge.engine.batch_sizes import BatchSizes
from kedge.engine.rollout.as_completed import num_workers
from kedge.errors import ConfigError
from kedge.math.importance import Correction
from kedge.protocols import RolloutEngine
from kedge.trainers.build.inputs import TrainerInputs

logger = logging.getLogger(__name__)

PARTIAL_BATCHES_PER_WORKER = 4  # so that a fast engine gets more work
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_rollout_engine(given: TrainerInputs, settings: RunSettings) -> None:
    """Check the rollout engine before any weight is loaded.

    Raises:
        ConfigError: names the option, its value and the fix.
    """
    kind = settings.rollout.kind
    if kind == "embedded":
        return
    if given.rollout_engine is not None:
        raise ConfigError(
            f"rollout_engine={kind!r} is set in the config and an engine is passed to the trainer;"
            " remove one of them"
        )
    if settings.rollout.uses_vllm:
        from kedge.backends.vllm.build import check_vllm

        check_vllm(settings.rollout, settings.sampling, model=given.model)


def whole_copy(
    policy: nn.Module, given: TrainerInputs, settings: RunSettings, accelerator: Accelerator
) -> nn.Module | None:
    """A full copy of the policy for the rollout engine, made before the policy is sharded.

    None if the engine samples from the learner's modules, or can copy them later.
    """
    copies = settings.rollout.kind != "embedded" or settings.max_lag > 0
    if not copies or given.rollout_engine is not None or sharding_strategy(accelerator) == "none":
        return None
    return copy.deepcopy(policy).requires_grad_(False).to(accelerator.device)


def check_resampling(algorithm: Algorithm, sizes: BatchSizes) -> None:
    """Check that no group is spread over ranks if groups are resampled.

    Raises:
        ConfigError: names the option, its value and the fix.
    """
    if algorithm.resample and sizes.local_rows % sizes.group:
        raise ConfigError(
            f"dynamic_sampling={algorithm.resample} needs whole groups on each rank, but"
            f" {sizes.local_rows} responses per rank are not a multiple of {sizes.group};"
            " change per_device_train_batch_size, or set dynamic_sampling=0"
        )


def build_rollout_engine(
    given: TrainerInputs,
    learner: HFLearner,
    settings: RunSettings,
    algorithm: Algorithm,
    *,
    tokenizer: Any,
    pad_id: int,
    policy: nn.Module | None = None,
) -> RolloutEngine:
    """The engine passed by the user, or the one that the config names.

    Args:
        given: the constructor arguments.
        learner: holds the policy.
        settings: the resolved config.
        algorithm: the algorithm.
        tokenizer: the policy's.
        pad_id: pads responses.
        policy: result of ``whole_copy``.

    Raises:
        ConfigError: it cannot be started, or cannot be divided among ranks.
    """
    if given.rollout_engine is not None:
        return given.rollout_engine
    dtype = DTYPES[settings.learner.precision]
    options = settings.rollout
    if options.kind == "embedded":
        return learner.wrap_engine(
            EmbeddedEngine(
                policy or learner.policy,
                pad_id=pad_id,
                tokenizer=tokenizer,
                shares_weights=settings.max_lag == 0,
                chunk_rows=settings.learner.chunk,
                autocast=dtype,
                extra_slot=algorithm.extra_slot,
            )
        )
    make = partial(
        _build_copying_engine,
        policy or learner.policy,
        pad_id=pad_id,
        tokenizer=tokenizer if settings.sampling.stop_strings else None,
        dtype=dtype,
        extra_slot=algorithm.extra_slot,
        chunk_rows=settings.learner.chunk,
    )
    in_process = options.kind == "vllm"  # each rank has a vLLM
    if learner.world_size > 1 and (settings.as_completed or in_process):
        return make(options=own_engines(options, ranks=learner.world_size), share=learner.rank)
    return build_shared_engine(
        partial(make, options=options),
        ranks=learner.world_size,
        timeout=options.timeout + options.start_timeout,
        extra_slots=int(algorithm.extra_slot),
    )


def own_engines(options: RolloutOptions, *, ranks: int) -> RolloutOptions:
    """The rollout options of one rank when each rank has separate engines.

    Raises:
        ConfigError: the number of engines is not a multiple of the ranks.
    """
    if options.kind == "vllm":
        return options
    schedule = f'rollout_schedule="as_completed" needs separate engines for each of {ranks} ranks'
    if options.kind not in ("ray", "vllm_server"):
        raise ConfigError(
            f"{schedule}, but {options.url or options.kind!r} is a single engine; use"
            " rollout_engine='vllm_server' or 'ray' with vllm_num_engines, or"
            ' rollout_schedule="in_order"'
        )
    if options.num_engines % ranks:
        raise ConfigError(
            f"{schedule}, but vllm_num_engines={options.num_engines} is not a multiple of {ranks};"
            f" set it to {ranks * max(1, round(options.num_engines / ranks))}, or"
            ' rollout_schedule="in_order"'
        )
    return replace(options, num_engines=options.num_engines // ranks)


def _build_copying_engine(
    policy: nn.Module,
    *,
    options: RolloutOptions,
    chunk_rows: int,
    share: int | None = None,
    **about: Any,
) -> RolloutEngine:
    """An engine with its own copy of the policy, in this process or another."""
    if options.kind == "ray":
        from kedge.backends.ray.build import ray_engines

        return ray_engines(policy, options, chunk_rows=chunk_rows, share=share, **about)
    from kedge.backends.vllm.build import vllm_engine

    return vllm_engine(policy, options, share=share is not None, **about)


def num_partial_batches(settings: RunSettings, sizes: BatchSizes, engine: RolloutEngine) -> int:
    """Partial batches per batch if sampled as completed; 0: whole batches in order.

    Raises:
        ConfigError: the prompts of a rank cannot be divided that way.
    """
    if not settings.as_completed:
        return 0
    if sizes.local_rows % sizes.group:
        raise ConfigError(
            f'rollout_schedule="as_completed" needs whole groups on each rank, but'
            f" {sizes.local_rows} responses per rank are not a multiple of {sizes.group};"
            ' change per_device_train_batch_size, or set rollout_schedule="in_order"'
        )
    prompts, wanted = sizes.local_prompts, settings.pieces
    divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
    if wanted is None:
        return max(
            n for n in divisors if n <= PARTIAL_BATCHES_PER_WORKER * len(num_workers(engine))
        )
    if wanted not in divisors:
        raise ConfigError(
            f"rollout_pieces={wanted} must divide the {prompts} prompts of a rank; valid values:"
            f" {', '.join(map(str, divisors))}"
        )
    return wanted


def build_correction(
    settings: RunSettings, algorithm: Algorithm, engine: RolloutEngine
) -> Correction | None:
    """The importance-sampling correction between learner and rollout engine, or None; logged.

    Raises:
        ConfigError: the engine records no log-probabilities, or token-level weights are set for an
            algorithm with one advantage per response.
    """
    requested, recorded = settings.correction, engine.logprobs != "none"
    name = type(engine).__name__
    if requested is None or (requested.reason and not recorded):
        if settings.max_lag > 0 and not recorded:
            logger.warning(
                "max_lag=%d trains on samples of older weights, but %s records no"
                " log-probabilities: the loss does not correct for stale samples",
                settings.max_lag,
                name,
            )
        return None
    if not recorded:
        raise ConfigError(
            f"sampler_correction={requested.kind!r} needs log-probabilities of the rollout engine,"
            f" but {name} records none; leave it unset"
        )
    level = requested.level or ("sequence" if algorithm.whole_responses else "token")
    if algorithm.whole_responses and level == "token":
        raise ConfigError(
            f"sampler_correction_level='token' needs token-level advantages, but {algorithm.name}"
            " has one advantage per response; set 'sequence' or 'sequence_mean', or"
            " ratio_level='token'"
        )
    high = HIGH[level] if requested.high is None else requested.high
    correction = Correction(kind=requested.kind, level=level, high=high, low=requested.low)
    if requested.reason:
        logger.warning(
            "%s: importance weights of learner over rollout engine multiply the advantages (%s, per"
            ' %s, bounded at %g); sampler_correction="off" disables them',
            requested.reason,
            requested.kind,
            level,
            high,
        )
    return correction
