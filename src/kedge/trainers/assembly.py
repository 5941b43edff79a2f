"""From what a user hands over to an engine that can run.  Everything is decided here, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from torch import nn

from kedge.algorithms import Algorithm
from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.fit import vocabulary
from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.settings import LearnerSettings
from kedge.backends.hub import logged_in
from kedge.config.on_policy import OnPolicyConfig
from kedge.config.resolve import RunSettings
from kedge.engine.loop import Engine
from kedge.engine.plan import BatchPlan
from kedge.engine.recording import Replay, Replayed
from kedge.errors import ConfigError
from kedge.protocols import RewardSource
from kedge.trainers.claim import check_targets
from kedge.trainers.evaluation import Evaluator
from kedge.trainers.given import Given
from kedge.trainers.hf_callbacks import Callbacks
from kedge.trainers.judging import judge_of
from kedge.trainers.launched import own_callbacks
from kedge.trainers.loading import loading_of
from kedge.trainers.models import (
    Models,
    check_models,
    first_reward,
    policy_of,
    reference_of,
    value_of,
)
from kedge.trainers.prompts import Prompting, eval_sets, pad_id, prompting
from kedge.trainers.referring import check_reference, reference_elsewhere
from kedge.trainers.rules import kl_controller, value_warmup
from kedge.trainers.run import Run
from kedge.trainers.sampling import (
    check_resampling,
    check_sampler,
    correction_of,
    pieces_of_run,
    sampler_of,
    whole_copy,
)
from kedge.trainers.saving import recording_of
from kedge.trainers.start import start_of

logger = logging.getLogger(__name__)


def assemble(
    given: Given,
    settings: RunSettings,
    algorithm: Algorithm,
    *,
    tokenizer: Any,
    accelerator: Accelerator,
) -> Run:
    """Everything a run needs.  Data and options are checked before any weight is loaded.

    Args:
        given: what the user handed over.
        settings: the config, resolved.
        algorithm: the learning rule.
        tokenizer: the policy's.
        accelerator: device and processes.

    Raises:
        ConfigError: options that cannot work.
        DataError: prompts that cannot be used.
    """
    args = given.args
    check_targets(args)
    prompts = prompting(
        given.train_dataset,
        tokenizer,
        settings,
        accelerator,
        collator=given.data_collator,
        min_group=algorithm.min_group,
    )
    sets = eval_sets(given.eval_dataset, args, settings, tokenizer, accelerator)
    sources = [prompts.source, *(each.source for each in sets)]
    _fill_in(args, prompts.plan.derived())
    check_sampler(given, settings)
    check_reference(given, settings, algorithm)
    models = models_of(given, settings, algorithm, tokenizer)
    rewards, checked = (given.reward_model, given.reward_funcs), sources
    if given.data_collator:
        checked = []
    check_models(models, rewards, checked, tokens=len(tokenizer), args=args)
    callbacks = callbacks_of(given, models, accelerator)
    judge = judge_of(
        given,
        settings,
        tokenizer,
        accelerator,
        tokens=min(len(tokenizer), vocabulary(models.policy) or len(tokenizer)),
        trainer_state=lambda: callbacks.state,
        columns=prompts.source.columns,
    )
    for source in sources if settings.data.drop_unused_columns else []:
        if isinstance(source, DatasetPrompts):
            source.keep(getattr(judge, "columns", None))
    copied = whole_copy(models.policy, given, settings, accelerator)
    learner = learner_of(models, given, settings, prompts.plan, accelerator)
    callbacks.watch(learner.optimizer, learner.scheduler)
    engine = engine_of(
        prompts, learner, judge, algorithm, settings, given, tokenizer=tokenizer, policy=copied
    )
    evaluator = Evaluator(
        engine=engine,
        settings=settings,
        callbacks=callbacks,
        tokenizer=tokenizer,
        sets=sets,
        reference=algorithm.needs_reference,
        start=start_of(args, has_prompts=bool(sets), main=accelerator.is_main_process),
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


def callbacks_of(given: Given, models: Models, accelerator: Accelerator) -> Callbacks:
    """The user's callbacks, those that report, and the one that pushes."""
    args = given.args
    reports = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if "trackio" in reports and args.trackio_space_id is not None and not logged_in():
        logger.warning("report_to=trackio: not logged in to the hub, so the dashboard is local")
        args.trackio_space_id = None
    return Callbacks(
        args,
        [*(given.callbacks or []), *own_callbacks(args)],
        model=models.policy,
        processing_class=given.processing_class,
        rank=accelerator.process_index,
        local_rank=accelerator.local_process_index,
    )


def models_of(given: Given, settings: RunSettings, algorithm: Algorithm, tokenizer: Any) -> Models:
    """Policy, reference and value model."""
    args, loading = given.args, loading_of(given)
    policy = policy_of(given.model, given.peft_config, args.model_adapter_name, loading=loading)
    elsewhere = settings.rollout.ray.ref_workers > 0
    reference, fresh = reference_of(
        policy,
        given.ref_model,
        args.ref_adapter_name,
        wanted=algorithm.needs_reference and not elsewhere,
        new_adapter=given.peft_config is not None,
        loading=loading,
    )
    fresh |= elsewhere and given.ref_model is None
    value = None
    if algorithm.needs_values:
        reward = first_reward(given.reward_model, given.reward_processing_class, tokenizer)
        low = settings.learner.allow_low_precision_weights
        value = value_of(given.value_model, reward, policy, settings.value, allow_low=low)
    return Models(policy=policy, reference=reference, fresh_reference=fresh, value=value)


def learner_of(
    models: Models,
    given: Given,
    settings: RunSettings,
    plan: BatchPlan,
    accelerator: Accelerator,
) -> HFLearner:
    """The models that train, and their optimiser."""
    options, sampling = settings.learner, settings.sampling
    how = LearnerSettings(
        total_updates=plan.updates,
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
        and given.rollout_engine is None,  # what others record is checked, not believed
        allow_low_precision_weights=options.allow_low_precision_weights,
    )
    return HFLearner(
        models.policy,
        given.args,
        how,
        value=models.value,
        reference=models.reference,
        elsewhere=reference_elsewhere(given, settings, models.policy, how, accelerator),
        accelerator=accelerator,
        optimizers=given.optimizers,
    )


def engine_of(
    prompts: Prompting,
    learner: HFLearner,
    judge: RewardSource,
    algorithm: Algorithm,
    settings: RunSettings,
    given: Given,
    *,
    tokenizer: Any,
    policy: nn.Module | None,
) -> Engine:
    """The loop with all its parts."""
    check_resampling(algorithm, prompts.plan)
    rollouts = sampler_of(
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
            about=recording_of(settings),
            rank=learner.accelerator.process_index,
            world_size=learner.accelerator.num_processes,
        )
        source = rollouts = judge = Replayed(replay, rows=prompts.plan.local_rows)
        algorithm = replace(algorithm, resample=0)  # what is replayed has been through it
    return Engine(
        source=source,
        rollouts=rollouts,
        judge=judge,
        learner=learner,
        algorithm=algorithm,
        kl=kl_controller(settings),
        plan=prompts.plan,
        sampling=settings.sampling,
        seed=settings.seed,
        max_lag=settings.max_lag,
        pieces=pieces_of_run(settings, prompts.plan, rollouts),
        correction=correction_of(settings, algorithm, rollouts),
        value_warmup_steps=value_warmup(settings, algorithm, prompts.plan),
    )


def _fill_in(args: OnPolicyConfig, derived: Mapping[str, int]) -> None:
    for name, value in derived.items():
        given = getattr(args, name)
        if given is not None and given != value:
            raise ConfigError(
                f"{name}={given} was given, but the other sizes make it {value}; leave it unset"
            )
        setattr(args, name, value)
