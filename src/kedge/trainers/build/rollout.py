"""The rollout engine of a run."""

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
from kedge.backends.hf.sharding import shards_asked
from kedge.backends.rollout import shared
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

PARTIAL_BATCHES_PER_WORKER = 4  # so that an engine that is done early finds another piece
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_rollout_engine(given: TrainerInputs, settings: RunSettings) -> None:
    """Refuse an engine that cannot work, before any weight is loaded.

    Raises:
        ConfigError: naming the option, its value and the way out.
    """
    kind = settings.rollout.kind
    if kind == "embedded":
        return
    if given.rollout_engine is not None:
        raise ConfigError(
            f"rollout_engine={kind!r} is set in the config, and an engine was given to the trainer,"
            " too; leave one of them out"
        )
    if settings.rollout.uses_vllm:
        from kedge.backends.vllm.build import check_vllm

        check_vllm(settings.rollout, settings.sampling, model=given.model)


def whole_copy(
    policy: nn.Module, given: TrainerInputs, settings: RunSettings, accelerator: Accelerator
) -> nn.Module | None:
    """A copy of the policy for an engine that holds one, made before ranks cut the policy up.

    None where the engine samples from the learner's own modules, or can copy them later.
    """
    held = settings.rollout.kind != "embedded" or settings.max_lag > 0
    if not held or given.rollout_engine is not None or shards_asked(accelerator) == "none":
        return None
    return copy.deepcopy(policy).requires_grad_(False).to(accelerator.device)


def check_resampling(algorithm: Algorithm, plan: BatchSizes) -> None:
    """Refuse to sample groups anew that are spread over processes.

    Raises:
        ConfigError: naming the option, its value and the way out.
    """
    if algorithm.resample and plan.local_rows % plan.group:
        raise ConfigError(
            f"dynamic_sampling={algorithm.resample} samples whole groups anew, and the"
            f" {plan.local_rows} responses of a process are not whole groups of {plan.group};"
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
    """The engine that the user gave, or the one that the options describe.

    Args:
        given: what the user handed over.
        learner: holds the policy that is sampled from.
        settings: the options.
        algorithm: the algorithm.
        tokenizer: the policy's.
        pad_id: fills responses after their end.
        policy: what ``whole_copy`` made.

    Raises:
        ConfigError: it cannot be started, or ranks cannot have engines of their own.
    """
    if given.rollout_engine is not None:
        return given.rollout_engine
    dtype = DTYPES[settings.learner.precision]
    options = settings.rollout
    if options.kind == "embedded":
        return learner.sampler(
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
        _elsewhere,
        policy or learner.policy,
        pad_id=pad_id,
        tokenizer=tokenizer if settings.sampling.stop_strings else None,
        dtype=dtype,
        extra_slot=algorithm.extra_slot,
        chunk_rows=settings.learner.chunk,
    )
    if settings.as_completed and learner.world_size > 1:
        return make(options=own_engines(options, ranks=learner.world_size), share=learner.rank)
    return shared(
        partial(make, options=options),
        ranks=learner.world_size,
        timeout=options.timeout + options.start_timeout,
        spare=int(algorithm.extra_slot),
    )


def own_engines(options: RolloutOptions, *, ranks: int) -> RolloutOptions:
    """The options of one rank's engines, where every rank samples at its own pace.

    Raises:
        ConfigError: the engines do not divide, or a rank cannot have some of its own.
    """
    schedule = f'rollout_schedule="as_completed" gives each of the {ranks} learners its own engines'
    if options.kind not in ("ray", "vllm_server"):
        raise ConfigError(
            f"{schedule}, and {options.url or options.kind!r} is one; use"
            " rollout_engine='vllm_server' or 'ray' with vllm_num_engines, or"
            ' rollout_schedule="in_order"'
        )
    if options.num_engines % ranks:
        raise ConfigError(
            f"{schedule}, and vllm_num_engines={options.num_engines} does not divide by {ranks};"
            f" set it to {ranks * max(1, round(options.num_engines / ranks))}, or"
            ' rollout_schedule="in_order"'
        )
    return replace(options, num_engines=options.num_engines // ranks)


def _elsewhere(
    policy: nn.Module,
    *,
    options: RolloutOptions,
    chunk_rows: int,
    share: int | None = None,
    **about: Any,
) -> RolloutEngine:
    """An engine that holds a copy of the policy, in this process or another."""
    if options.kind == "ray":
        from kedge.backends.ray.build import ray_engines

        return ray_engines(policy, options, chunk_rows=chunk_rows, share=share, **about)
    from kedge.backends.vllm.build import vllm_engine

    return vllm_engine(policy, options, share=share is not None, **about)


def num_partial_batches(settings: RunSettings, plan: BatchSizes, engine: RolloutEngine) -> int:
    """How many pieces a batch is sampled in, as they are done; 0: in order, whole.

    Raises:
        ConfigError: the prompts of a process cannot be cut like that.
    """
    if not settings.as_completed:
        return 0
    if plan.local_rows % plan.group:
        raise ConfigError(
            f'rollout_schedule="as_completed" cuts a batch between prompts, and the'
            f" {plan.local_rows} responses of a process are not whole groups of {plan.group};"
            ' change per_device_train_batch_size, or set rollout_schedule="in_order"'
        )
    prompts, wanted = plan.local_prompts, settings.pieces
    fitting = [n for n in range(1, prompts + 1) if prompts % n == 0]
    if wanted is None:
        return max(n for n in fitting if n <= PARTIAL_BATCHES_PER_WORKER * len(num_workers(engine)))
    if wanted not in fitting:
        raise ConfigError(
            f"rollout_pieces={wanted} does not divide the {prompts} prompts of a process; these do:"
            f" {', '.join(map(str, fitting))}"
        )
    return wanted


def build_correction(
    settings: RunSettings, algorithm: Algorithm, engine: RolloutEngine
) -> Correction | None:
    """How tokens are weighed for what sampled them, or None; the log says which is used.

    Raises:
        ConfigError: the engine records no log-probabilities, or the algorithm has one advantage per
            response and weights per token are asked for.
    """
    asked, recorded = settings.correction, engine.logprobs != "none"
    name = type(engine).__name__
    if asked is None or (asked.reason and not recorded):
        if settings.max_lag > 0 and not recorded:
            logger.warning(
                "max_lag=%d trains on samples of older weights, and %s records no log-probabilities"
                " to tell how far the policy has moved since: the loss will not correct for it",
                settings.max_lag,
                name,
            )
        return None
    if not recorded:
        raise ConfigError(
            f"sampler_correction={asked.kind!r} weighs tokens by learner against sampler, and"
            f" {name} records no log-probabilities; leave it out"
        )
    level = asked.level or ("sequence" if algorithm.whole_responses else "token")
    if algorithm.whole_responses and level == "token":
        raise ConfigError(
            f"sampler_correction_level='token' weighs tokens, and {algorithm.name} has one"
            " advantage per response; set 'sequence' or 'sequence_mean', or ratio_level='token'"
        )
    high = HIGH[level] if asked.high is None else asked.high
    how = Correction(kind=asked.kind, level=level, high=high, low=asked.low)
    if asked.reason:
        logger.warning(
            "%s: advantages are weighed by learner against sampler (%s, weights of the %s bounded"
            ' at %g); sampler_correction="off" turns it off',
            asked.reason,
            asked.kind,
            level,
            high,
        )
    return how
