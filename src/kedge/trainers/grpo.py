"""GRPO for language models: advantages relative to the other responses to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback
from typing_extensions import Unpack

from kedge.algorithms import Algorithm, grpo
from kedge.algorithms.transforms import decouple_rewards
from kedge.config.grpo import GRPOConfig
from kedge.suggestions import suggest_names
from kedge.trainers.base import TrainerShell
from kedge.trainers.spec import SharedArguments, TrainerSpec, filter_responses, log_trl_names


def build_grpo(args: GRPOConfig, reward_weights: Sequence[float] | None = None) -> Algorithm:
    """GRPO with the options, filters and penalties of the config."""
    algorithm = grpo(
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        delta=args.delta,
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        use_bias_correction_kl=args.use_bias_correction_kl,
        loss_type=args.loss_type,
        scale_rewards=args.scale_rewards,
        importance_sampling_level=args.importance_sampling_level,
        response_length=args.response_length,
        credit=args.credit,
    )
    if args.multi_objective_aggregation == "normalize_then_sum":
        algorithm = decouple_rewards(algorithm, reward_weights)
    return filter_responses(algorithm, args)


@suggest_names("argument", config=GRPOConfig, also=SharedArguments.__optional_keys__)
class GRPOTrainer(TrainerShell):
    """Trains a causal language model with GRPO, or one of its variants, against a reward.

    Args:
        args: every option; see ``GRPOConfig``.
        model, reward_funcs, train_dataset, eval_dataset, processing_class: as in ``PPOTrainer``.
        callbacks, optimizers, peft_config, data_collator: as in ``PPOTrainer``.
        reward_processing_classes: tokenizers of reward models that differ from the policy's.
        ref_model: the reference of the KL terms.  None: if ``beta`` or ``kl_coef`` is above 0, a
            frozen copy of the policy; under a new adapter, the equal base model.
        shared: ``reward_weights``, ``algorithm``, ``environment``, ``tools`` and others; see
            ``SharedArguments``.

    Raises:
        ConfigError: invalid or conflicting options, before any weight is loaded where possible.
        DataError: invalid prompts.
    """

    SPEC = TrainerSpec(
        name="GRPO", config=GRPOConfig, algorithm=build_grpo, metric_names=log_trl_names
    )

    def __init__(
        self,
        model: str | nn.Module | None = None,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        *,
        ref_model: str | nn.Module | None = None,
        data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
        **shared: Unpack[SharedArguments],
    ) -> None:
        super().__init__(
            args,
            model=model,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            ref_model=ref_model,
            data_collator=data_collator,
            **shared,
        )
