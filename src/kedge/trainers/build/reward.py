"""Builds the reward source of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kedge.backends.data import DatasetPrompts
from kedge.backends.rewards import (
    FunctionOptions,
    MetricCapturingSource,
    ModelOptions,
    RewardLog,
    check_sources,
    reward_source,
)
from kedge.protocols import RewardSource
from kedge.trainers.build.loading import trusts
from kedge.trainers.build.models import Models
from kedge.trainers.build.setup import Setup


class RewardStage:
    """Reward models, functions and penalties, combined into one reward source."""

    def __init__(self, setup: Setup) -> None:
        inputs = setup.inputs
        self.setup, self.weights = setup, inputs.reward_weights
        if self.weights is None:
            self.weights = setup.args.reward_weights
        check_sources(
            inputs.reward_model,
            inputs.reward_funcs,
            weights=self.weights,
            dataset_columns=self._columns,
        )

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
        mixture: dict[str, Any] = {
            "policy_tokenizer": setup.tokenizer,
            "weights": self.weights,
            "tokenizers": inputs.reward_processing_classes,
            "missing_eos_penalty": args.missing_eos_penalty,
            "non_eos_penalty": args.non_eos_penalty,
            "penalty_reward_value": args.penalty_reward_value,
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
                inputs.reward_model,
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
