"""Builds a run from the constructor arguments of a trainer, stage by stage.

Each stage checks its options when it is created and makes its part in ``build``.  All stages are
created before the first one loads weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from kedge.config.base import OnPolicyConfig
from kedge.config.common import EnvironmentArguments
from kedge.config.declare import read_mapping
from kedge.data import DatasetPrompts
from kedge.errors import ConfigError
from kedge.learner.distributed import sharding_strategy
from kedge.learner.learner import HFLearner
from kedge.loop.batch_sizes import BatchSizes
from kedge.loop.control import AdaptiveKL, EntropyBonus, FixedKL
from kedge.loop.loop import Engine
from kedge.math.running import RunningMoments
from kedge.models.load import without_weights
from kedge.protocols import RewardSource, RolloutEngine
from kedge.rewards import check_sources, reward_source
from kedge.trainers.assembly.models import LearnerStage, Models, ModelStage, receives_weights
from kedge.trainers.assembly.rollout import RolloutStage
from kedge.trainers.assembly.setup import Setup, build_setup, pick_tokenizer, trusts_remote_code
from kedge.trainers.run.hf_callbacks import Callbacks, own_callbacks
from kedge.trainers.run.run import Run
from kedge.trainers.spec import TrainerInputs, as_list, shared_kwargs

logger = logging.getLogger(__name__)
LARGE = 300_000_000  # weights; smaller models take larger learning rates, and are for experiments
HIGH_RATE = 2e-5
HIGHEST_RATE = 1e-2  # no transformer trains at a higher learning rate
SMALL_BATCH = 16  # responses per batch
WIDE_CLIP = 0.01
N_PLUS = "(Huang et al. 2024, arXiv:2403.17031)"


def assemble_run(inputs: TrainerInputs) -> Run:
    """Build everything a run needs; all options are checked before any weights are loaded."""
    make_environment, args = None, inputs.args
    if any((inputs.tools, inputs.environment_factory, inputs.rollout_func)) or any(
        x is not None for x in (inputs.environment, args.environment, args.environment_kwargs)
    ):
        from kedge.trainers.assembly import environments

        inputs, make_environment = environments.find_environments(inputs)
    for name, field in EnvironmentArguments.__dataclass_fields__.items():
        if make_environment is None and getattr(args, name) != field.default:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} has no effect without an environment; leave it"
                " out, or pass environment, tools or environment_factory"
            )
    setup = build_setup(inputs)
    if make_environment is not None:
        environments.check_turns_end(setup.sampling, args)
    models = ModelStage(setup)
    reward = RewardStage(setup)
    learner = LearnerStage(setup)
    rollout = RolloutStage(setup)
    callbacks = build_callbacks(setup)

    # All checks have passed: from here on weights are loaded and actors are started.
    with without_weights(receives_weights(setup)):
        loaded = models.build()
    for text in advise(args, loaded.policy, setup.sizes):
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
        partial_batches=rollout.num_partial_batches(rollout_engine),
        in_flight_weight_updates=args.in_flight_weight_updates,
        correction=rollout.correction,
        value_warmup_steps=setup.value_warmup_steps,
        value_passes=getattr(args, "num_value_epochs", 1),
        entropy_bonus=EntropyBonus(
            coef=args.entropy_coef,
            adaptive=args.use_adaptive_entropy,
            target=args.entropy_target,
            delta=args.entropy_coef_delta,
            low=args.entropy_coef_min,
            high=args.entropy_coef_max,
        ),
        reward_scale=RunningMoments(learner.all_reduce)
        if getattr(args, "scale_rewards", None) == "running"
        else None,
    )


def advise(args: OnPolicyConfig, policy: nn.Module, sizes: BatchSizes) -> Iterable[str]:
    """Warnings about settings that rarely train well, with better values and their source.

    Defaults that come from other libraries stay, so that a moved script trains as before.

    Args:
        args: the config.
        policy: the policy before sharding.
        sizes: responses of an iteration, over all ranks, and iterations.
    """
    batch_size = sizes.batch_size
    weights = sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    high = args.learning_rate >= HIGH_RATE and args.num_ppo_epochs > 1
    if args.learning_rate > HIGHEST_RATE:
        yield (
            f"learning_rate={args.learning_rate:g} is far too high for a language model, which"
            " diverges; typical: 1e-6 to 5e-5 for all weights, 1e-4 for adapters"
        )
    elif high and trained >= LARGE:  # adapters take larger learning rates
        yield (
            f"learning_rate={args.learning_rate:g} with num_ppo_epochs={args.num_ppo_epochs} is"
            f" high for {trained / 1e6:,.0f} million trained weights; recommended:"
            f" learning_rate=3e-6 {N_PLUS}"
        )
    episodes = args.total_episodes
    if episodes is not None and episodes % batch_size and args.max_steps < 1:
        whole = math.ceil(episodes / batch_size) * batch_size
        yield (
            f"total_episodes={episodes} is not a multiple of the {batch_size} responses of an"
            f" iteration: the run has {whole}"
        )
    if batch_size <= SMALL_BATCH and weights >= LARGE:
        yield (
            f"an iteration has {batch_size} responses, which makes gradients noisy; recommended:"
            f" 512, by a larger gradient_accumulation_steps {N_PLUS}"
        )
    level = getattr(args, "importance_sampling_level", "token")
    if level == "sequence" and args.epsilon >= WIDE_CLIP:
        yield (
            f"epsilon={args.epsilon:g} with importance_sampling_level='sequence' hardly ever clips,"
            " since the ratio is a mean over the response; recommended: epsilon=3e-4,"
            " epsilon_high=4e-4 (Zheng et al. 2025, arXiv:2507.18071)"
        )
    warmup = getattr(args, "value_warmup_steps", 0)
    if warmup >= sizes.iterations:
        yield (
            f"value_warmup_steps={warmup} covers all {sizes.iterations} iterations: the policy will"
            " not be trained"
        )


class RewardStage:
    """Reward models, functions and penalties, combined into one reward source."""

    def __init__(self, setup: Setup) -> None:
        inputs = setup.inputs
        self.setup, self.weights = setup, inputs.reward_weights
        if self.weights is None:
            self.weights = setup.args.reward_weights
        check_sources(
            self._reward_models(setup.args.reward_adapter),
            inputs.reward_funcs,
            weights=self.weights,
            dataset_columns=self._columns,
        )
        sharded = sharding_strategy(setup.accelerator) != "none"
        check_reward_adapter(setup.args, sharded=sharded)

    def _reward_models(self, adapter: Any) -> list[Any]:
        """The reward models, the reward adapter last."""
        models = [*as_list(self.setup.inputs.reward_model), adapter]
        return [model for model in models if model is not None]

    @property
    def _columns(self) -> list[str] | None:
        """Columns that reward functions can read; None if a rollout function adds others."""
        setup = self.setup
        return None if setup.inputs.rollout_func is not None else setup.prompts.columns

    def build(self, models: Models, trainer_state: Callable[[], object]) -> RewardSource:
        """Load the reward models, here or in workers.

        Args:
            models: the policy, whose tokens are scored.
            trainer_state: returns the argument ``trainer_state`` of reward functions.
        """
        setup, inputs, args = self.setup, self.setup.inputs, self.setup.args
        mixture = shared_kwargs(args, reward_source) | {
            "policy_tokenizer": setup.tokenizer,
            "weights": self.weights,
            "tokenizers": inputs.reward_processing_classes,
        }
        tokens = len(setup.tokenizer)
        model_options: dict[str, Any] = {
            "chunk_rows": args.local_rollout_forward_batch_size,
            "trust_remote_code": trusts_remote_code(args),
            "autocast": setup.dtype,
            "policy_vocab_size": min(tokens, models.vocabulary or tokens),
        }
        function_options: dict[str, Any] = {
            "on_error": args.on_reward_error,
            "error_score": args.reward_error_score,
            "timeout": args.reward_timeout,
            "dataset_columns": self._columns,
        }
        source: RewardSource
        if args.ray_reward_workers:
            from kedge.ray.rewards import Recipe, ray_rewards

            recipe = Recipe(
                reward_model=inputs.reward_model,
                reward_funcs=inputs.reward_funcs,
                models=model_options,
                functions=function_options,
                mixture=mixture,
            )
            source = ray_rewards(
                recipe,
                setup.ray_cluster,
                workers=args.ray_reward_workers,
                gpus=args.ray_reward_gpus,
                trainer_state=trainer_state,
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
                each.keep(getattr(source, "columns", None))
        return source


def check_reward_adapter(args: OnPolicyConfig, *, sharded: bool) -> None:
    """Check that the learner scores, between its own passes, with a whole base."""
    if args.reward_adapter is None:
        return
    problem = None
    if sharded:
        problem = "FSDP or DeepSpeed shards; launch without sharding"
    elif args.ray_reward_workers:
        problem = "reward workers do not have; set ray_reward_workers=0"
    elif args.max_lag:
        problem = f"would train at the same time with max_lag={args.max_lag}; set max_lag=0"
    if problem is not None:
        raise ConfigError(
            f"reward_adapter={args.reward_adapter!r} is scored with the learner's base, which"
            f" {problem}, or pass a reward_model"
        )
