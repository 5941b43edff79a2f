"""Builds the reward source of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from accelerate import Accelerator

from kedge.backends.rewards import (
    FunctionOptions,
    MetricCapturingSource,
    ModelOptions,
    RewardLog,
    reward_source,
)
from kedge.config.resolve import RunSettings
from kedge.protocols import RewardSource
from kedge.trainers.build.inputs import TrainerInputs, trusts
from kedge.trainers.build.rollout import DTYPES


def build_reward_source(
    given: TrainerInputs,
    settings: RunSettings,
    tokenizer: Any,
    accelerator: Accelerator,
    *,
    tokens: int,
    trainer_state: Callable[[], object],
    columns: Collection[str] | None,
) -> RewardSource:
    """Combine reward models, functions and penalties into one reward source.

    Args:
        given: the constructor arguments.
        settings: the resolved config.
        tokenizer: the policy's.
        accelerator: device and ranks.
        tokens: number of token ids that the policy can sample.
        trainer_state: returns the argument ``trainer_state`` of reward functions.
        columns: dataset columns that reward functions can take as arguments.
    """
    options, weights, log = settings.reward, given.reward_weights, RewardLog()
    mixture: dict[str, Any] = {
        "policy_tokenizer": tokenizer,
        "weights": options.weights if weights is None else weights,
        "tokenizers": given.reward_processing_class,
        "missing_eos_penalty": options.penalty if options.missing_stop == "subtract" else None,
        "non_eos_penalty": options.missing_stop == "replace",
        "penalty_reward_value": options.penalty,
    }
    models: dict[str, Any] = {
        "chunk_rows": options.chunk,
        "trust_remote_code": trusts(given.args),
        "autocast": DTYPES[settings.learner.precision],
        "policy_vocab_size": tokens,
    }
    functions: dict[str, Any] = {
        "on_error": options.on_error,
        "error_score": options.error_score,
        "dataset_columns": columns,
    }
    if settings.rollout.ray.reward_workers:
        from kedge.backends.ray.rewards import Recipe, ray_rewards

        recipe = Recipe(
            reward_model=given.reward_model,
            reward_funcs=given.reward_funcs,
            models=models,
            functions=functions,
            mixture=mixture,
        )
        workers = ray_rewards(recipe, settings.rollout, log=log, trainer_state=trainer_state)
        return MetricCapturingSource(workers, log)
    source = reward_source(
        given.reward_model,
        given.reward_funcs,
        models=ModelOptions(device=accelerator.device, **models),
        functions=FunctionOptions(log=log, trainer_state=trainer_state, **functions),
        **mixture,
    )
    return MetricCapturingSource(source, log)
