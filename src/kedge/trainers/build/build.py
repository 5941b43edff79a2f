"""Builds a run from the constructor arguments of a trainer.  All choices are made here, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from torch import nn

from kedge.algorithms import Algorithm
from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.compatibility import vocabulary
from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.settings import LearnerSettings
from kedge.backends.hub import logged_in
from kedge.config.base import OnPolicyConfig
from kedge.config.resolve import RunSettings
from kedge.engine.batch_sizes import BatchSizes
from kedge.engine.checkpoint.replay import Replay, Replayed
from kedge.engine.loop import Engine
from kedge.errors import ConfigError
from kedge.protocols import RewardSource
from kedge.trainers.build.algorithm import kl_controller, value_warmup
from kedge.trainers.build.data import PromptData, build_eval_sets, build_prompt_data, pad_id
from kedge.trainers.build.inputs import TrainerInputs
from kedge.trainers.build.models import (
    Models,
    build_policy,
    build_reference,
    build_value_model,
    check_models,
    first_reward,
    loading_options,
)
from kedge.trainers.build.reference import build_remote_reference, check_reference
from kedge.trainers.build.reward import build_reward_source
from kedge.trainers.build.rollout import (
    build_correction,
    build_rollout_engine,
    check_resampling,
    check_rollout_engine,
    num_partial_batches,
    whole_copy,
)
from kedge.trainers.run.checkpoint import recording_fingerprint
from kedge.trainers.run.evaluation import Evaluator, build_initial_scores
from kedge.trainers.run.hf_callbacks import Callbacks, own_callbacks
from kedge.trainers.run.output_lock import check_targets
from kedge.trainers.run.run import Run

logger = logging.getLogger(__name__)


def build_run(
    given: TrainerInputs,
    settings: RunSettings,
    algorithm: Algorithm,
    *,
    tokenizer: Any,
    accelerator: Accelerator,
) -> Run:
    """Build everything a run needs; data and options are checked before any weight is loaded.

    Args:
        given: the constructor arguments.
        settings: the resolved config.
        algorithm: the algorithm.
        tokenizer: the policy's.
        accelerator: device and ranks.

    Raises:
        ConfigError: invalid or conflicting options.
        DataError: invalid prompts.
    """
    args = given.args
    check_targets(args)
    prompts = build_prompt_data(
        given.train_dataset,
        tokenizer,
        settings,
        accelerator,
        collator=given.data_collator,
        min_group=algorithm.min_group,
    )
    sets = build_eval_sets(given.eval_dataset, args, settings, tokenizer, accelerator)
    sources = [prompts.source, *(eval_set.source for eval_set in sets)]
    _set_derived_options(args, prompts.plan.derived())
    check_rollout_engine(given, settings)
    check_reference(given, settings, algorithm)
    models = build_models(given, settings, algorithm, tokenizer)
    rewards, checked_sources = (
        (given.reward_model, given.reward_funcs),
        [] if given.data_collator else sources,
    )
    check_models(models, rewards, checked_sources, tokens=len(tokenizer), args=args)
    callbacks = build_callbacks(given, models, accelerator)
    reward_source = build_reward_source(
        given,
        settings,
        tokenizer,
        accelerator,
        tokens=min(len(tokenizer), vocabulary(models.policy) or len(tokenizer)),
        trainer_state=lambda: callbacks.state,
        columns=prompts.source.columns,
    )
    if settings.data.drop_unused_columns:
        _keep_columns(sources, reward_source)
    policy_copy = whole_copy(models.policy, given, settings, accelerator)
    learner = build_learner(models, given, settings, prompts.plan, accelerator)
    callbacks.watch(learner.optimizer, learner.scheduler)
    parts = (prompts, learner, reward_source, algorithm, settings, given)
    engine = build_engine(*parts, tokenizer=tokenizer, policy=policy_copy)
    evaluator = Evaluator(
        engine=engine,
        settings=settings,
        callbacks=callbacks,
        tokenizer=tokenizer,
        sets=sets,
        reference=algorithm.needs_reference,
        initial_scores=build_initial_scores(
            args, has_prompts=bool(sets), main=accelerator.is_main_process
        ),
    )
    return Run(
        args=args,
        settings=settings,
        engine=engine,
        learner=learner,
        callbacks=callbacks,
        evaluator=evaluator,
        tokenizer=tokenizer,
        fresh_reference=models.fresh_reference,
    )


def _keep_columns(sources: Sequence[object], reward_source: object) -> None:
    """Drop the dataset columns that the reward does not read."""
    for source in sources:
        if isinstance(source, DatasetPrompts):
            source.keep(getattr(reward_source, "columns", None))


def build_callbacks(given: TrainerInputs, models: Models, accelerator: Accelerator) -> Callbacks:
    """The user's callbacks, those for reporting, and the one that pushes to the hub."""
    args = given.args
    reports = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if "trackio" in reports and args.trackio_space_id is not None and not logged_in():
        logger.warning("report_to=trackio: not logged in to the hub; the dashboard stays local")
        args.trackio_space_id = None
    return Callbacks(
        args,
        [*(given.callbacks or []), *own_callbacks(args)],
        model=models.policy,
        processing_class=given.processing_class,
        rank=accelerator.process_index,
        local_rank=accelerator.local_process_index,
    )


def build_models(
    given: TrainerInputs, settings: RunSettings, algorithm: Algorithm, tokenizer: Any
) -> Models:
    """Policy, reference and value model."""
    args, loading = given.args, loading_options(given)
    policy = build_policy(given.model, given.peft_config, args.model_adapter_name, loading=loading)
    remote = settings.rollout.ray.ref_workers > 0
    reference, fresh = build_reference(
        policy,
        given.ref_model,
        args.ref_adapter_name,
        wanted=algorithm.needs_reference and not remote,
        new_adapter=given.peft_config is not None,
        loading=loading,
    )
    fresh |= remote and given.ref_model is None
    value = None
    if algorithm.needs_values:
        reward = first_reward(given.reward_model, given.reward_processing_class, tokenizer)
        low = settings.learner.allow_low_precision_weights
        value = build_value_model(given.value_model, reward, policy, settings.value, allow_low=low)
    return Models(policy=policy, reference=reference, fresh_reference=fresh, value=value)


def build_learner(
    models: Models,
    given: TrainerInputs,
    settings: RunSettings,
    sizes: BatchSizes,
    accelerator: Accelerator,
) -> HFLearner:
    """The trained models and their optimizer."""
    options, sampling = settings.learner, settings.sampling
    learner_settings = LearnerSettings(
        total_updates=sizes.updates,
        temperature=sampling.temperature,
        min_new_tokens=sampling.min_new_tokens,
        stop_ids=sampling.stop_ids,
        value_learning_rate=settings.value.learning_rate,
        max_grad_norm=options.max_grad_norm,
        forward_rows=options.chunk,
        gradient_checkpointing=options.gradient_checkpointing,
        checkpointing_options=options.gradient_checkpointing_kwargs or None,
        reuse_behavior_logprobs=options.precision == "no"
        and settings.max_lag == 0
        and settings.rollout.kind == "embedded"
        and given.rollout_engine is None,  # log-probabilities of other engines are verified
        allow_low_precision_weights=options.allow_low_precision_weights,
    )
    return HFLearner(
        models.policy,
        given.args,
        learner_settings,
        value=models.value,
        reference=models.reference,
        remote_reference=build_remote_reference(
            given, settings, models.policy, learner_settings, accelerator
        ),
        accelerator=accelerator,
        optimizers=given.optimizers,
    )


def build_engine(
    prompts: PromptData,
    learner: HFLearner,
    reward_source: RewardSource,
    algorithm: Algorithm,
    settings: RunSettings,
    given: TrainerInputs,
    *,
    tokenizer: Any,
    policy: nn.Module | None,
) -> Engine:
    """The training loop with all its parts."""
    check_resampling(algorithm, prompts.plan)
    rollout_engine = build_rollout_engine(
        given,
        learner,
        settings,
        algorithm,
        tokenizer=tokenizer,
        pad_id=pad_id(tokenizer),
        policy=policy,
    )
    source: Any = prompts.source
    if settings.replay_rollouts is not None:
        replay = Replay(
            settings.replay_rollouts,
            about=recording_fingerprint(settings),
            rank=learner.accelerator.process_index,
            world_size=learner.accelerator.num_processes,
        )
        source = rollout_engine = reward_source = Replayed(replay, rows=prompts.plan.local_rows)
        algorithm = replace(algorithm, resample=0)  # replayed batches were resampled before
    return Engine(
        source=source,
        rollout_engine=rollout_engine,
        reward=reward_source,
        learner=learner,
        algorithm=algorithm,
        kl=kl_controller(settings),
        batch_sizes=prompts.plan,
        sampling=settings.sampling,
        seed=settings.seed,
        max_lag=settings.max_lag,
        partial_batches=num_partial_batches(settings, prompts.plan, rollout_engine),
        correction=build_correction(settings, algorithm, rollout_engine),
        value_warmup_steps=value_warmup(settings, algorithm, prompts.plan),
    )


def _set_derived_options(args: OnPolicyConfig, derived: Mapping[str, int]) -> None:
    """Store the derived sizes in the config; a value that was set must agree."""
    for name, value in derived.items():
        given = getattr(args, name)
        if given is not None and given != value:
            raise ConfigError(
                f"{name}={given} must be {value}, as the other sizes imply; leave it unset"
            )
        setattr(args, name, value)
