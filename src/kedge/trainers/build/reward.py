"""What scores the responses of a run."""

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
    """One reward source out of models and functions, with the penalties of the options.

    Args:
        given: what the user handed over.
        settings: the options.
        tokenizer: the policy's.
        accelerator: device and processes.
        tokens: ids that the policy can write are below it.
        trainer_state: what reward functions get under this name.
        columns: of the dataset, where reward functions may ask for them.
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
