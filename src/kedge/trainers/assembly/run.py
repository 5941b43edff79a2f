"""Builds a run from the constructor arguments of a trainer, stage by stage.

Each stage checks its options when it is created and makes its part in ``build``.  All stages are
created before the first one loads weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from kedge.config.common import EnvironmentArguments
from kedge.config.declare import read_mapping
from kedge.config.rollout_engines import load_workers
from kedge.data import DatasetPrompts
from kedge.learner.distributed import sharding_strategy
from kedge.learner.learner import HFLearner
from kedge.learner.learner_state import WeightCopier
from kedge.loop.control import AdaptiveKL, FixedKL
from kedge.loop.loop import Engine
from kedge.math.ratios import Correction
from kedge.math.running import RunningMoments
from kedge.models.compatibility import vocabulary
from kedge.models.load import without_weights
from kedge.records.errors import ConfigError
from kedge.records.protocols import EngineInfo, RewardInfo, RewardSource, RolloutEngine, read_info
from kedge.records.types import Sampling
from kedge.rewards import check_sources, reward_source
from kedge.rewards.build import as_list
from kedge.trainers.advice import SETTINGS, Settings, apply
from kedge.trainers.assembly.models import LearnerStage, Models, ModelStage, receives_weights
from kedge.trainers.assembly.setup import Setup, build_setup, pick_tokenizer, trusts_remote_code
from kedge.trainers.hf_callbacks import Callbacks, own_callbacks
from kedge.trainers.launch import launch_context
from kedge.trainers.run import Run, recording_fingerprint
from kedge.trainers.spec import TrainerInputs

if TYPE_CHECKING:
    from kedge.checkpoint.replay import RolloutReplay
    from kedge.rollout.engines import RankSharedEngine

logger = logging.getLogger(__name__)
Kind = Literal["truncate", "mask"]
Level = Literal["token", "sequence", "sequence_mean"]

HIGH: dict[Level, float] = {"token": 2.0, "sequence": 5.0, "sequence_mean": 1.01}


def assemble_run(inputs: TrainerInputs) -> Run:
    """Build everything a run needs; all options are checked before any weights are loaded."""
    make_environment, check_prompts, args = None, None, inputs.args
    if any((inputs.tools, inputs.environment_factory, inputs.rollout_func)) or any(
        x is not None for x in (inputs.environment, args.environment, args.environment_kwargs)
    ):
        from kedge.trainers.assembly import environments

        inputs, make_environment = environments.find_environments(inputs)
    for f in fields(EnvironmentArguments):
        if make_environment is None and getattr(args, f.name) != f.default:
            raise ConfigError(
                f"{f.name}={getattr(args, f.name)!r} has no effect without an environment; leave it"
                " out, or pass environment, tools or environment_factory"
            )
    setup = build_setup(inputs)
    if make_environment is not None:
        environments.check_turns_end(setup.sampling, args)
        check_prompts = partial(environments.check_columns, setup, make_environment)
        check_prompts([setup.prompts, *(eval_set.source for eval_set in setup.eval_sets)])
        if args.drop_reasoning:
            environments.check_conversations(setup)
    models = ModelStage(setup)
    reward = RewardStage(setup, plays=make_environment is not None)
    learner = LearnerStage(setup)
    rollout = RolloutStage(setup)
    callbacks = build_callbacks(setup)

    # All checks have passed: from here on weights are loaded and actors are started.
    with without_weights(receives_weights(setup)):
        loaded = models.build()
    settings = Settings(args, loaded.policy, setup.sizes, plays=make_environment is not None)
    for text in apply(SETTINGS, settings):
        if setup.accelerator.is_main_process:
            logger.warning(text)
    tokenizer = pick_tokenizer(inputs.processing_class, setup.tokenizer)
    callbacks.start(model=loaded.policy, processing_class=tokenizer)
    reward_source = reward.build(loaded, trainer_state=lambda: callbacks.state)
    hf_learner = learner.build(loaded)
    rollout_engine = rollout.build(hf_learner, loaded)
    if make_environment is not None and rollout.replayed is None:
        rollout_engine = environments.play_in(
            make_environment,
            args,
            rollout_engine,
            setup.tokenizer,
            chat_template_kwargs=read_mapping(args.chat_template_kwargs),
            keep_last_observation=getattr(args, "bootstrap_truncated", False),
            pad_id=setup.pad_id,
            extra_column=setup.algorithm.extra_column,
            context=loaded.context(args),
            vocabulary=vocabulary(loaded.policy),
            keep_environments=read_info(reward_source, RewardInfo).reads_environments,
        )
    engine = build_engine(setup, reward_source, hf_learner, rollout_engine, rollout)
    callbacks.watch(hf_learner.optimizer, hf_learner.scheduler)
    return Run(
        trainer=inputs.trainer,
        args=args,
        engine=engine,
        learner=hf_learner,
        callbacks=callbacks,
        eval_sets=setup.eval_sets,
        tokenizer=setup.tokenizer,
        check_prompts=check_prompts,
        fresh_reference=loaded.fresh_reference,
        metric_names=inputs.spec.metric_names(args, engine),
    )


def build_callbacks(setup: Setup) -> Callbacks:
    """Collect the callbacks of user and options, not yet started."""
    args = setup.args
    if "trackio" in as_list(args.report_to) and args.trackio_space_id is not None:
        from huggingface_hub import get_token

        if get_token() is None:
            logger.warning("report_to=trackio: not logged in to the hub; the dashboard stays local")
            args.trackio_space_id = None
    return Callbacks(
        args,
        [*(setup.inputs.callbacks or []), *own_callbacks(args)],
        rank=setup.accelerator.process_index,
        local_rank=setup.accelerator.local_process_index,
    )


def build_engine(
    setup: Setup,
    reward: RewardSource,
    learner: HFLearner,
    rollout_engine: RolloutEngine,
    rollout: RolloutStage,
) -> Engine:
    """Assemble the training loop."""
    args, algorithm, source = setup.args, setup.algorithm, setup.prompts
    if rollout.replayed is not None:
        source = reward = rollout.replayed  # type: ignore[assignment]
        algorithm = replace(algorithm, resample=0)  # the recorded batches were already resampled
    return Engine(
        source=source,
        rollout_engine=rollout_engine,
        reward=reward,
        learner=learner,
        algorithm=algorithm,
        kl=AdaptiveKL(value=args.kl_coef, target=args.kl_target, horizon=args.kl_horizon)
        if args.adaptive_kl
        else FixedKL(value=args.kl_coef),
        batch_sizes=setup.sizes,
        sampling=setup.sampling,
        seed=args.seed,
        max_lag=args.max_lag or 0,
        max_token_lag=args.max_lag if args.sampler_correction == "mask_old" else None,
        as_completed=rollout.as_completed,
        in_flight_weight_updates=args.in_flight_weight_updates,
        correction=rollout.correction,
        value_warmup_steps=setup.value_warmup_steps,
        value_passes=getattr(args, "num_value_epochs", 1),
        entropy_coef=args.entropy_coef,
        reward_scale=RunningMoments(learner.all_reduce)
        if getattr(args, "scale_rewards", None) == "running"
        else None,
    )


class RewardStage:
    """Reward models, functions and penalties, combined into one reward source."""

    def __init__(self, setup: Setup, *, plays: bool) -> None:
        inputs = setup.inputs
        args, own = setup.args, inputs.reward_weights
        # Environments live in this process, reward workers do not.
        self._environments = ["environments"] if plays and not args.ray_reward_workers else []
        self.setup, self.weights = setup, args.reward_weights if own is None else own
        check_sources(
            self._reward_models(args.reward_adapter),
            inputs.reward_funcs,
            weights=self.weights,
            dataset_columns=self._columns,
        )
        # A reward adapter is scored between the learner's own passes, with a whole base.
        lag, sharded = args.max_lag, sharding_strategy(setup.accelerator) != "none"
        problems = {
            "FSDP or DeepSpeed shards; launch without sharding": sharded,
            "reward workers do not have; set ray_reward_workers=0": args.ray_reward_workers,
            f"would train at the same time with max_lag={lag}; set max_lag=0": lag,
        }
        for problem, applies in problems.items():
            if applies and args.reward_adapter is not None:
                raise ConfigError(
                    f"reward_adapter={args.reward_adapter!r} is scored with the learner's base,"
                    f" which {problem}, or pass a reward_model"
                )

    def _reward_models(self, adapter: Any) -> list[Any]:
        """The reward models, the reward adapter last."""
        return [*as_list(self.setup.inputs.reward_model), *as_list(adapter)]

    @property
    def _columns(self) -> list[str] | None:
        """Columns that reward functions can read; None if a rollout function adds others."""
        setup = self.setup
        if setup.inputs.rollout_func is not None:
            return None
        return [*setup.prompts.columns, *self._environments]

    def build(self, models: Models, trainer_state: Callable[[], object]) -> RewardSource:
        """Load the reward models, here or in workers."""
        setup, inputs, args = self.setup, self.setup.inputs, self.setup.args
        mixture = {
            "missing_eos_penalty": args.missing_eos_penalty,
            "non_eos_penalty": args.non_eos_penalty,
            "penalty_reward_value": args.penalty_reward_value,
            "policy_tokenizer": setup.tokenizer,
            "ends": setup.sampling.stop_ids,
            "weights": self.weights,
            "tokenizers": inputs.reward_processing_classes,
        }
        tokens = len(setup.tokenizer)
        model_options: dict[str, Any] = {
            "chunk_rows": args.local_rollout_forward_batch_size,
            "trust_remote_code": trusts_remote_code(args),
            "autocast": setup.dtype,
            "policy_vocab_size": min(tokens, vocabulary(models.policy) or tokens),
        }
        if inputs.spec.equal_vocabulary:
            model_options["equal_vocabulary"] = vocabulary(models.policy)
        kinds = type(inputs.trainer).__mro__
        if any("train" in vars(kind) for kind in kinds if not kind.__module__.startswith("kedge.")):
            model_options["check_labels"] = False  # its own loop may read another number
        function_options: dict[str, Any] = {
            "on_error": args.on_reward_error,
            "error_score": args.reward_error_score,
            "timeout": args.reward_timeout,
        }
        source: RewardSource
        if args.ray_reward_workers:
            make = partial(reward_source, inputs.reward_model, inputs.reward_funcs, **mixture)
            source = load_workers(args).build_rewards(
                args, make, model_options, function_options, trainer_state=trainer_state
            )
        else:
            source = reward_source(
                self._reward_models(models.reward_adapter),
                inputs.reward_funcs,
                models=model_options | {"device": setup.accelerator.device},
                functions=function_options | {"trainer_state": trainer_state},
                **mixture,
            )
        prompts: list[Any] = [setup.prompts, *(eval_set.source for eval_set in setup.eval_sets)]
        for each in prompts if args.remove_unused_columns and inputs.rollout_func is None else ():
            if isinstance(each, DatasetPrompts):
                each.keep(read_info(source, RewardInfo).columns)
        return source


# -- the rollout engine ----------------------------------------------------------------------------


class RolloutStage:
    """The rollout engine: a recording, the one passed by the user, or the one the config names."""

    def __init__(self, setup: Setup) -> None:
        args, custom = setup.args, setup.inputs.rollout_engine
        self.setup, self.spec = setup, setup.engine
        if custom is not None and self.spec.copies_weights:
            raise ConfigError(
                f"rollout_engine={args.rollout_engine!r} is set in the config and an engine is"
                " passed to the trainer; remove one of them"
            )
        if self.spec.check is not None:
            resolve_name(self.spec.check)(setup.inputs.model, setup.sampling, args)
        self.as_completed = args.rollout_schedule == "as_completed"
        self.replayed: RolloutReplay | None = None
        if args.replay_rollouts is not None:
            from kedge.checkpoint.replay import RolloutReplay

            self.replayed = RolloutReplay(
                str(args.replay_rollouts),
                settings=recording_fingerprint(setup.sampling),
                rank=setup.accelerator.process_index,
                world_size=setup.accelerator.num_processes,
                rows=setup.sizes.local_rows,
            )
        ready = self.replayed or custom
        # All ranks share the engines, which rank 0 has.
        self.shared = ready is None and self.spec.copies_weights and not self.spec.per_rank
        self._check_groups()
        self.correction = build_correction(
            args,
            engine=type(ready).__name__,
            vllm=self.spec.vllm,
            logprobs="sampled" if ready is None else ready.logprob_kind,
            sampling=setup.sampling,
        )

    def build(self, learner: HFLearner, models: Models) -> RolloutEngine:
        """Start the rollout engine, with the policy of the learner."""
        setup, args = self.setup, self.setup.args
        ready = self.replayed or setup.inputs.rollout_engine
        if ready is not None:
            return ready
        copies = self.spec.copies_weights
        from kedge.rollout.engines import EngineInputs

        inputs = EngineInputs(
            policy=models.policy_copy or learner.policy,
            pad_id=setup.pad_id,
            tokenizer=setup.tokenizer if setup.sampling.stop_strings or not copies else None,
            dtype=setup.dtype,
            extra_column=setup.algorithm.extra_column,
            chunk_rows=args.local_rollout_forward_batch_size,
        )
        make = partial(resolve_name(self.spec.build), inputs, args)
        if not copies:
            return learner.wrap_engine(make())
        engine = self._share(make) if self.shared and learner.world_size > 1 else make()
        info = read_info(engine, EngineInfo)
        learner.copy_weights = WeightCopier(
            first_only=self.shared,
            dtype=info.sync_dtype,
            stage=info.stage_weights,
            device="cpu",
            live=args.max_lag == 0,
        )
        return engine

    def _share(self, make: Callable[[], RolloutEngine]) -> RankSharedEngine:
        """Make an engine on rank 0 that all ranks share."""
        from kedge.rollout.engines import RankGroups, RankSharedEngine

        args, mail = self.setup.args, launch_context() if self.spec.actors else None
        groups = RankGroups(args.rollout_timeout + args.worker_start_timeout, mail)
        extra_columns = int(self.setup.algorithm.extra_column)
        return RankSharedEngine(make, groups, extra_columns=extra_columns)

    def _check_groups(self) -> None:
        """Check that ranks have whole groups."""
        sizes, resample = self.setup.sizes, self.setup.algorithm.resample
        if (resample or self.as_completed) and sizes.local_rows % sizes.group:
            option, default = 'rollout_schedule="as_completed"', 'rollout_schedule="in_order"'
            if resample:
                option, default = f"dynamic_sampling={resample}", "dynamic_sampling=0"
            raise ConfigError(
                f"{option} needs whole groups on each rank, but {sizes.local_rows} responses per"
                f" rank are not a multiple of {sizes.group}; change per_device_train_batch_size,"
                f" or set {default}"
            )


def build_correction(
    args: Any, *, engine: str, vllm: bool, logprobs: str, sampling: Sampling
) -> Correction | None:
    """The correction that a run uses, or None; logged if it is on by default.

    ``sampler_correction*`` acts at every lag.  Unset, weights per token truncated at 2 are on with
    vLLM, from ``max_lag=2``, and in flight.  ``engine`` is a name for messages, and
    ``logprobs`` its ``RolloutEngine.logprob_kind``, with these ``sampling`` parameters.
    """
    asked, correction = _asked_correction(args)
    recorded = logprobs != "none"
    in_flight = args.in_flight_weight_updates  # tokens may be older than max_lag
    needed = correction is not None or args.max_lag > 0 or in_flight
    if needed and logprobs == "raw" and sampling.changes_logprobs:
        option = asked[0] if correction is not None else "max_lag"
        raise ConfigError(
            f"{option}={getattr(args, option)!r} needs log-probabilities of the distribution that"
            f" {engine} samples from, but it records those of the model (logprob_kind='raw')"
            " without temperature, top_k, top_p, min_p and min_new_tokens; record the former"
            " (logprob_kind='sampled'), set temperature=1 without the others, or set max_lag=0"
            " without a correction"
        )
    if not asked and recorded and (vllm or in_flight or args.max_lag >= 2):
        correction = Correction()
        logger.warning(
            "%s: importance weights of learner over rollout engine multiply the advantages (%s, per"
            ' %s, bounded at %g); sampler_correction="off" disables them',
            "vLLM samples" if vllm else f"max_lag={args.max_lag}",
            *(correction.kind, correction.level, correction.high),
        )
    if correction is None and args.max_lag > 0 and not recorded:
        logger.warning(
            "max_lag=%d trains on samples of older weights, but %s records no log-probabilities:"
            " the loss does not correct for stale samples",
            *(args.max_lag, engine),
        )
    if correction is not None and not recorded:
        raise ConfigError(
            f"{asked[0]}={getattr(args, asked[0])!r} needs log-probabilities of the rollout engine,"
            f" but {engine} records none; leave it unset"
        )
    return correction


def _asked_correction(args: Any) -> tuple[list[str], Correction | None]:
    """The correction options that are set, and the correction they describe."""
    mode = args.sampler_correction or "off"
    names = [f"sampler_correction_{x}" for x in ("level", "low", "high")]
    own = [name for name in names if getattr(args, name) is not None]
    asked = own if mode == "auto" else ["sampler_correction", *own]
    if mode in ("off", "ratio") and own:
        raise ConfigError(
            f"{own[0]}={getattr(args, own[0])!r} has no effect with sampler_correction={mode!r};"
            " leave one of them out"
        )
    if not asked or mode == "off":
        return asked, None
    if mode == "ratio":
        return asked, Correction(kind="ratio")
    level: Level = args.sampler_correction_level or "token"
    kind: Kind = "mask" if mode == "mask" else "truncate"
    low, high = args.sampler_correction_low, args.sampler_correction_high
    high = HIGH[level] if high is None else high
    if low is None and kind == "mask" and high > 1:  # symmetric bounds, as in verl
        low = 1 / high
    _check_order("sampler_correction_low", low, "sampler_correction_high", high)
    return asked, Correction(kind=kind, level=level, high=high, low=low or 0.0)


def _check_order(low_name: str, low: float | None, high_name: str, high: float) -> None:
    if low is not None and low >= high:
        raise ConfigError(f"{low_name}={low:g} must be less than {high_name}={high:g}")
