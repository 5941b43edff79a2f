"""Builds the reward source of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.sharding import sharding_strategy
from kedge.backends.rewards import (
    FunctionOptions,
    MetricCapturingSource,
    ModelOptions,
    RewardLog,
    check_sources,
    reward_source,
)
from kedge.config.base import OnPolicyConfig
from kedge.errors import ConfigError
from kedge.protocols import RewardSource
from kedge.trainers.build.loading import trusts
from kedge.trainers.build.models import Models
from kedge.trainers.build.setup import Setup
from kedge.trainers.spec import shared_kwargs


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

    def _reward_models(self, adapter: Any) -> Any:
        """The reward models, the reward adapter last."""
        given = self.setup.inputs.reward_model
        if adapter is None:
            return given
        return [*(given if isinstance(given, list | tuple) else [given] if given else []), adapter]

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
        setup, inputs, args, log = self.setup, self.setup.inputs, self.setup.args, RewardLog()
        mixture = shared_kwargs(args, reward_source) | {
            "policy_tokenizer": setup.tokenizer,
            "weights": self.weights,
            "tokenizers": inputs.reward_processing_classes,
        }
        tokens = len(setup.tokenizer)
        model_options: dict[str, Any] = {
            "chunk_rows": args.local_rollout_forward_batch_size,
            "trust_remote_code": trusts(args),
            "autocast": setup.dtype,
            "policy_vocab_size": min(tokens, models.vocabulary or tokens),
        }
        function_options: dict[str, Any] = {
            "on_error": args.on_reward_error,
            "error_score": args.reward_error_score,
            "dataset_columns": self._columns,
        }
        source: RewardSource
        if args.ray_reward_workers:
            from kedge.backends.ray.rewards import Recipe, ray_rewards

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
                log=log,
                trainer_state=trainer_state,
            )
        else:
            source = reward_source(
                self._reward_models(models.reward_adapter),
                inputs.reward_funcs,
                models=ModelOptions(device=setup.accelerator.device, **model_options),
                functions=FunctionOptions(log=log, trainer_state=trainer_state, **function_options),
                **mixture,
            )
        if args.remove_unused_columns and inputs.rollout_func is None:
            self._keep_columns(getattr(source, "columns", None))
        return MetricCapturingSource(source, log)

    def _keep_columns(self, columns: Any) -> None:
        """Drop the dataset columns that the reward does not read."""
        setup = self.setup
        for prompts in (setup.prompts, *(eval_set.source for eval_set in setup.eval_sets)):
            if isinstance(prompts, DatasetPrompts):
                prompts.keep(columns)


def check_reward_adapter(args: OnPolicyConfig, *, sharded: bool) -> None:
    """Check that the learner scores, between its own passes, with a whole base.

    Raises:
        ConfigError: naming the option that moves scoring elsewhere.
    """
    option = f"reward_adapter={args.reward_adapter!r}"
    if args.reward_adapter is None:
        return
    if sharded:
        raise ConfigError(
            f"{option} is scored with the learner's base, which FSDP or DeepSpeed shards; launch"
            " without sharding, or pass a reward_model"
        )
    if args.ray_reward_workers:
        raise ConfigError(
            f"{option} is scored with the learner's base, which reward workers do not have; set"
            " ray_reward_workers=0, or pass a reward_model"
        )
    if args.max_lag:
        raise ConfigError(
            f"{option} is scored with the learner's base, which would train at the same time with"
            f" max_lag={args.max_lag}; set max_lag=0, or pass a reward_model"
        )
