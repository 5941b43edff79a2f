"""From a trainer's arguments to a run, on one page: read ``assemble`` from top to bottom.

Everything is checked before weights are loaded and actors are started, so that a mistake costs
seconds.  The builder of a part stands beside the part and gets a frozen record, which
``trainers/options.py`` makes from the config.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from kedge.algorithms import Algorithm
from kedge.algorithms.transforms import without_reference
from kedge.checkpoint.replay import RolloutReplay
from kedge.config.base import OnPolicyConfig
from kedge.config.declare import read_mapping
from kedge.config.ppo import PPOConfig
from kedge.config.rollout_engines import RolloutEngineSpec, find_engine, load_workers, vllm_limit
from kedge.data import DatasetPrompts
from kedge.data.prompts import pad_id
from kedge.learner.distributed import accelerator_for
from kedge.learner.learner import HFLearner
from kedge.learner.learner_state import WeightCopier
from kedge.learner.models import ModelOptions, Models, check_models, load_models
from kedge.loop.batch_sizes import BatchSizes
from kedge.loop.control import AdaptiveKL, FixedKL
from kedge.loop.corrections import build_correction
from kedge.loop.loop import Engine
from kedge.math.ratios import Correction
from kedge.math.running import RunningMoments
from kedge.models.compatibility import vocabulary
from kedge.models.load import eos_token_ids, find_tokenizer, pick_tokenizer
from kedge.output import check_targets
from kedge.records.errors import ConfigError
from kedge.records.protocols import EngineInfo, RewardInfo, RewardSource, RolloutEngine, read_info
from kedge.records.types import Sampling
from kedge.rewards import check_sources, reward_source
from kedge.rewards.build import as_list
from kedge.rollout.scheduler.as_completed import check_algorithm
from kedge.trainers import options
from kedge.trainers.advice import SETTINGS, Settings, apply
from kedge.trainers.eval_metrics import EvalMetrics
from kedge.trainers.hf_callbacks import build_callbacks
from kedge.trainers.launch import launch_context
from kedge.trainers.prompts import build_eval_sets, build_prompts, check_prompts
from kedge.trainers.run import Run, open_replay
from kedge.trainers.spec import TrainerInputs

if TYPE_CHECKING:
    from kedge.environments import EnvironmentRollouts
    from kedge.environments.load import Environments

logger = logging.getLogger(__name__)


def assemble(inputs: TrainerInputs) -> Run:
    """Build everything a run needs; all options are checked before any weights are loaded."""
    # ---- Check everything ----
    # Environments: however they were given, from here on there is one way.
    inputs, environments = find_environments(inputs)
    args, spec, plays = inputs.args, inputs.spec, environments is not None
    check_targets(args)
    accelerator, engine = accelerator_for(args), find_engine(args)

    # The tokenizer, and where responses end.
    model, loading = inputs.model, options.loading_options(args)
    # Code that comes with a tokenizer runs only if the config says so, whatever the model's.
    tokenizer = find_tokenizer(
        inputs.processing_class, model, {**loading, "trust_remote_code": args.trust_remote_code}
    )
    assert model is not None  # find_tokenizer requires it
    ends = eos_token_ids(
        model,
        tokenizer,
        revision=loading.get("revision"),
        trust_remote_code=loading["trust_remote_code"],
    )
    sampling = options.sampling_options(args, ends)

    # The algorithm; a reference that no KL term reads is left out, unless it was passed.
    algorithm = inputs.algorithm
    if algorithm is None:
        algorithm = spec.algorithm(args, inputs.weights)
        if inputs.ref_model is None and args.kl_coef == args.loss_kl_coef == 0:
            algorithm = without_reference(algorithm)

    # Prompts, and every size of the run.
    prompts, sizes = build_prompts(
        inputs.train_dataset,
        args,
        tokenizer,
        accelerator,
        min_group=algorithm.min_group,
        collator=inputs.data_collator,
    )
    options.check_sizes(args, sizes)
    eval_sets = build_eval_sets(inputs.eval_dataset, args, tokenizer, accelerator)

    # Environments again, models, rewards and rollouts, each against what is known by now.
    models = options.model_options(
        inputs, algorithm, engine, accelerator, tokenizer=tokenizer, loading=loading, plays=plays
    )
    setup = Setup(
        inputs=inputs,
        accelerator=accelerator,
        engine=engine,
        tokenizer=tokenizer,
        sampling=sampling,
        algorithm=algorithm,
        prompts=[prompts, *(eval_set.source for eval_set in eval_sets)],
        sizes=sizes,
        models=models,
        replay=open_replay(args.replay_rollouts, sampling, sizes, rank=accelerator.process_index),
        plays=plays,
        eval_metrics=inputs.compute_metrics and EvalMetrics(inputs.compute_metrics),
    )
    if environments is not None:
        check_environments(setup, environments)
    check_models(models)
    check_rewards(setup)
    correction = check_rollouts(setup)
    callbacks = build_callbacks(args, inputs.callbacks, accelerator)

    # ---- Load weights and start actors ----
    loaded = load_models(models)
    if inputs.data_collator is None:  # it makes prompts later
        check_prompts(setup.prompts, args, loaded.named)
    for text in apply(SETTINGS, Settings(args, loaded.policy, sizes, plays=plays)):
        if accelerator.is_main_process:
            logger.warning(text)
    processing_class = pick_tokenizer(inputs.processing_class, tokenizer)
    callbacks.start(model=loaded.policy, processing_class=processing_class)
    reward = build_reward(setup, loaded, trainer_state=lambda: callbacks.state)
    learner = build_learner(setup, loaded)
    rollout_engine = build_rollout_engine(setup, loaded, learner)
    if environments is not None and setup.replay is None:
        rollout_engine = play(setup, environments, rollout_engine, loaded, reward)
    loop = build_loop(setup, reward, learner, rollout_engine, correction)
    callbacks.watch(learner.optimizer, learner.scheduler)
    return Run(  # with its hooks: logging, warnings, evaluation and checkpoints
        trainer=inputs.trainer,
        args=args,
        engine=loop,
        learner=learner,
        callbacks=callbacks,
        eval_sets=eval_sets,
        tokenizer=tokenizer,
        check_prompts=None if environments is None else environments.check_columns,
        fresh_reference=loaded.fresh_reference,
        metric_names=spec.metric_names(args, loop),
        eval_metrics=setup.eval_metrics,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is known about a run before weights are loaded."""

    inputs: TrainerInputs  # without the four ways to give environments
    accelerator: Accelerator
    engine: RolloutEngineSpec  # selected by the config
    tokenizer: Any
    sampling: Sampling
    algorithm: Algorithm
    prompts: list[Any]  # of training, and of each evaluation set
    sizes: BatchSizes
    models: ModelOptions
    replay: RolloutReplay | None  # recorded rollouts, which replace prompts, sampling and scoring
    plays: bool  # the policy plays in environments
    eval_metrics: EvalMetrics | None  # of the user

    @property
    def args(self) -> OnPolicyConfig:
        """The trainer's copy of the config, with the derived sizes."""
        return self.inputs.args

    @property
    def ready(self) -> RolloutEngine | None:
        """The rollout engine that needs no building: a recording, or the one that was passed."""
        return self.replay or self.inputs.rollout_engine

    @property
    def ranks_share(self) -> bool:
        """Whether all ranks share the engines, which rank 0 has."""
        return self.ready is None and self.engine.copies_weights and not self.engine.per_rank


# -- checks ----------------------------------------------------------------------------------------


def find_environments(inputs: TrainerInputs) -> tuple[TrainerInputs, Environments | None]:
    """The environments, whose modules are loaded only where something plays."""
    environments = None
    if inputs.gives_episodes:
        from kedge.trainers.environments import resolve_environment

        inputs, environments = resolve_environment(inputs)
    options.check_limits(inputs.args, plays=environments is not None)
    return inputs, environments


def check_environments(setup: Setup, environments: Environments) -> None:
    """Check that turns can end, and that prompts and the chat template suit the environments."""
    from kedge.environments.episode import check_turns_end
    from kedge.environments.load import check_conversations

    args = setup.args
    check_turns_end(setup.sampling, args.max_turn_tokens)
    environments.check_columns(setup.prompts)
    if args.drop_reasoning:
        kwargs = read_mapping(args.chat_template_kwargs)
        check_conversations(setup.prompts[0], setup.tokenizer, kwargs)


def check_rewards(setup: Setup) -> None:
    """Check the reward sources, and that a reward adapter can be scored on the learner's base."""
    inputs, args, columns = setup.inputs, setup.args, None
    if not read_info(inputs.rollout_engine, EngineInfo).more_columns:
        # Environments live in this process, reward workers do not.
        here = setup.plays and not args.ray_reward_workers
        columns = [*setup.prompts[0].columns, *(["environments"] if here else [])]
        if setup.eval_metrics is not None:
            for prompts in setup.prompts[1:]:
                setup.eval_metrics.signature.check(prompts.columns)
    check_sources(
        [*as_list(inputs.reward_model), *as_list(args.reward_adapter)],
        inputs.reward_funcs,
        weights=inputs.weights,
        dataset_columns=columns,
    )
    # A reward adapter is scored between the learner's own passes, with a whole base.
    lag = args.max_lag
    problems = {
        "FSDP or DeepSpeed shards; launch without sharding": setup.models.sharded,
        "reward workers do not have; set ray_reward_workers=0": args.ray_reward_workers,
        f"would train at the same time with max_lag={lag}; set max_lag=0": lag,
    }
    for problem, applies in problems.items():
        if applies and args.reward_adapter is not None:
            raise ConfigError(
                f"reward_adapter={args.reward_adapter!r} is scored with the learner's base,"
                f" which {problem}, or pass a reward_model"
            )


def check_rollouts(setup: Setup) -> Correction | None:
    """Check what samples, and in which parts; returns the correction of its log-probabilities."""
    args, spec, sizes, ready = setup.args, setup.engine, setup.sizes, setup.ready
    if setup.inputs.rollout_engine is not None and spec.copies_weights:
        raise ConfigError(
            f"rollout_engine={args.rollout_engine!r} is set in the config and an engine is"
            " passed to the trainer; remove one of them"
        )
    if spec.check is not None:
        resolve_name(spec.check)(setup.inputs.model, setup.sampling, args)
    if rounds := setup.algorithm.resample:
        sizes.check_whole_groups(f"dynamic_sampling={rounds}", "dynamic_sampling=0")
    if args.rollout_schedule == "as_completed":
        check_algorithm(setup.algorithm)
        if args.vllm_sleep:
            raise ConfigError(
                "vllm_sleep=True lets vLLM sleep between whole batches, which"
                ' rollout_schedule="as_completed" does not have; set one of them to its default'
            )
        sizes.check_whole_groups('rollout_schedule="as_completed"', 'rollout_schedule="in_order"')
    return build_correction(
        options.correction_options(args),
        engine=type(ready).__name__,
        vllm=spec.vllm,
        logprobs="sampled" if ready is None else ready.logprob_kind,
        sampling=setup.sampling,
    )


# -- rewards and the learner -----------------------------------------------------------------------


def build_reward(
    setup: Setup, models: Models, *, trainer_state: Callable[[], object]
) -> RewardSource:
    """Load the reward models, here or in workers, and combine all sources."""
    inputs, args = setup.inputs, setup.args
    how = options.reward_options(
        inputs, setup.tokenizer, setup.sampling, vocabulary=vocabulary(models.policy)
    )
    source: RewardSource
    if args.ray_reward_workers:
        make = partial(reward_source, inputs.reward_model, inputs.reward_funcs)
        source = load_workers(args).build_rewards(args, make, how, trainer_state=trainer_state)
    else:
        source = reward_source(
            [*as_list(inputs.reward_model), *as_list(models.reward_adapter)],
            inputs.reward_funcs,
            how,
            device=setup.accelerator.device,
            trainer_state=trainer_state,
        )
    if args.remove_unused_columns and not read_info(setup.ready, EngineInfo).more_columns:
        columns = read_info(source, RewardInfo).columns
        if columns is not None and setup.eval_metrics is not None:
            more = setup.eval_metrics.signature.columns
            columns = None if more is None else columns | more
        for prompts in setup.prompts:
            if isinstance(prompts, DatasetPrompts):
                prompts.keep(columns)
    return source


def build_learner(setup: Setup, models: Models) -> HFLearner:
    """Build the optimizer, start reference workers, and shard the models if asked."""
    args, given = setup.args, setup.inputs.rollout_engine is not None
    settings = options.learner_settings(
        args,
        setup.sizes,
        setup.sampling,
        needs_values=setup.algorithm.needs_values,
        # Other engines have copies of the weights, so what they sampled is verified anyway.
        own_samples=args.max_lag == 0 and not setup.engine.copies_weights and not given,
    )
    remote = None
    if args.ray_ref_workers:
        remote = load_workers(args).build_reference(
            args,
            models.to_send(setup.inputs.ref_model, setup.accelerator),
            settings,
            autocast=options.precision(args),
            quick=not args.torch_compile,
            trust=args.trust_remote_code,
        )
    return HFLearner(
        models.policy,
        args,
        settings,
        value=models.value,
        reference=models.reference,
        remote=remote,
        accelerator=setup.accelerator,
        optimizers=setup.inputs.optimizers,
    )


# -- rollouts and the loop -------------------------------------------------------------------------


def build_rollout_engine(setup: Setup, models: Models, learner: HFLearner) -> RolloutEngine:
    """The rollout engine: a recording, the one that was passed, or what the config names."""
    args, spec, sampling = setup.args, setup.engine, setup.sampling
    if setup.ready is not None:
        return setup.ready
    from kedge.rollout.engines import EngineInputs, RankGroups, RankSharedEngine

    extra = setup.algorithm.extra_column
    inputs = EngineInputs(
        policy=models.policy_copy or learner.policy,
        pad_id=pad_id(setup.tokenizer),
        tokenizer=setup.tokenizer if sampling.stop_strings or not spec.copies_weights else None,
        dtype=options.precision(args),
        extra_column=extra,
        chunk_rows=args.local_rollout_forward_batch_size,
    )
    make: Callable[[], RolloutEngine] = partial(resolve_name(spec.build), inputs, args)
    if not spec.copies_weights:
        return learner.wrap_engine(make())
    if setup.ranks_share and learner.world_size > 1:
        mail = launch_context() if spec.actors else None
        groups = RankGroups(args.rollout_timeout + args.worker_start_timeout, mail)
        engine: RolloutEngine = RankSharedEngine(make, groups, extra_columns=int(extra))
    else:
        engine = make()
    info = read_info(engine, EngineInfo)
    learner.copy_weights = WeightCopier(
        first_only=setup.ranks_share,
        dtype=info.sync_dtype,
        stage=info.stage_weights,
        device="cpu",
        live=args.max_lag == 0,
    )
    return engine


def play(
    setup: Setup,
    environments: Environments,
    engine: RolloutEngine,
    models: Models,
    reward: RewardSource,
) -> EnvironmentRollouts:
    """Put the environments around the engine, which samples their turns."""
    from kedge.environments import EnvironmentRollouts

    args = setup.args
    limits = filter(None, [models.context, *vllm_limit(args).values()])
    return EnvironmentRollouts(
        engine,
        environments.make,
        setup.tokenizer,
        options.episode_limits(args, context=min(limits, default=None)),
        chat_template_kwargs=read_mapping(args.chat_template_kwargs),
        pad_id=pad_id(setup.tokenizer),
        extra_column=setup.algorithm.extra_column,
        drop_reasoning=args.drop_reasoning,
        vocabulary=vocabulary(models.policy),
        keep_environments=read_info(reward, RewardInfo).reads_environments,
    )


def build_loop(
    setup: Setup,
    reward: RewardSource,
    learner: HFLearner,
    rollout_engine: RolloutEngine,
    correction: Correction | None,
) -> Engine:
    """Build the training loop."""
    args, algorithm, source = setup.args, setup.algorithm, setup.prompts[0]
    value = options.value_arguments(args)
    running = isinstance(args, PPOConfig) and args.scale_rewards == "running"
    if setup.replay is not None:
        source = reward = setup.replay
        algorithm = replace(algorithm, resample=0)  # the recorded batches were already resampled
    kl: AdaptiveKL | FixedKL = FixedKL(value=args.kl_coef)
    if args.adaptive_kl:
        kl = AdaptiveKL(value=args.kl_coef, target=args.kl_target, horizon=args.kl_horizon)
    return Engine(
        source=source,
        rollout_engine=rollout_engine,
        reward=reward,
        learner=learner,
        algorithm=algorithm,
        kl=kl,
        batch_sizes=setup.sizes,
        sampling=setup.sampling,
        seed=args.seed,
        max_lag=args.max_lag or 0,
        max_token_lag=args.max_lag if args.sampler_correction == "mask_old" else None,
        as_completed=args.rollout_schedule == "as_completed",
        in_flight_weight_updates=args.in_flight_weight_updates,
        correction=correction,
        value_warmup_steps=learner.settings.value_warmup_steps,
        value_passes=value.num_value_epochs,
        entropy_coef=args.entropy_coef,
        reward_scale=RunningMoments(learner.all_reduce) if running else None,
    )
