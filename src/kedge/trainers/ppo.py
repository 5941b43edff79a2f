"""PPO for language models, with a Trainer-style interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import TrainerCallback
from typing_extensions import Unpack

from kedge.algorithms import Algorithm, ppo
from kedge.algorithms.transforms import divide_by_length
from kedge.config.ppo import PPOConfig
from kedge.math.advantage import length_adaptive_lambda
from kedge.math.losses import Clip, RatioMask
from kedge.records.errors import ConfigError
from kedge.suggestions import suggest_names
from kedge.trainers.base import TrainerShell
from kedge.trainers.spec import SharedArguments, TrainerSpec, filter_responses


def build_ppo(args: PPOConfig, reward_weights: Sequence[float] | None = None) -> Algorithm:
    """PPO with the options, filters and penalties of the config."""
    if args.credit == "turn" and args.lam_alpha:
        raise ConfigError(
            f"lam_alpha={args.lam_alpha} counts tokens; lambda would be 0 up to"
            f" {1 / args.lam_alpha:.3g} turns. With credit='turn' set lam instead"
        )
    high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    alpha, masks = args.lam_alpha, args.policy_loss == "mask"
    algorithm = ppo(
        gamma=args.gamma,
        lam=partial(length_adaptive_lambda, alpha=alpha) if alpha else args.lam,
        lam_value=args.lam_value,
        cliprange=(
            RatioMask(args.cliprange, high) if masks else Clip(args.cliprange, high, args.dual_clip)
        ),
        cliprange_value=args.cliprange_value,
        vf_coef=args.vf_coef,
        kl_estimator=args.kl_estimator,
        whiten_rewards=args.whiten_rewards,
        whiten_advantages=args.whiten_advantages,
        score_position=args.score_position,
        bootstrap_truncated=args.bootstrap_truncated,
        credit=args.credit,
    )
    algorithm = filter_responses(algorithm, args)
    if args.loss_aggregation == "sequence":
        algorithm = replace(algorithm, weighting="row_then_token_mean")
    if args.loss_aggregation == "constant":
        algorithm = divide_by_length(algorithm, response_length=args.response_length)
    return algorithm


@suggest_names("argument", config=PPOConfig, also=SharedArguments.__optional_keys__)
class PPOTrainer(TrainerShell):
    """Trains a causal language model with PPO against a reward.

    Args:
        args: every option; see ``PPOConfig``.
        processing_class: the policy's tokenizer.  None: loaded with a model given by name.
        model: the policy: a model, a folder or a hub name.
        ref_model: the reference of the KL penalty.  None: a frozen copy of the policy; under a
            new adapter, the equal base model.
        reward_model: a sequence-classification model, a folder or name, or a list of them.
        train_dataset: prompts in a column ``prompt`` or ``query`` (text or chat messages), or
            ``input_ids``.
        value_model: the value model.  None: see ``PPOConfig.value_source``.
        data_collator: pads a list of ``{"input_ids", "attention_mask"}``; None: the built-in one.
        eval_dataset: evaluation prompts, or a dict of named datasets.
        optimizers: a custom pair ``(optimizer, lr_scheduler)``; None for the default.
        callbacks: ``transformers.TrainerCallback`` objects or classes.
        peft_config: trains this adapter on the policy.
        reward_funcs: Python functions, ``"module:function"`` strings, models, or a list of these,
            next to or instead of ``reward_model``.
        reward_processing_class: tokenizers of reward models that differ from the policy's.
        shared: ``reward_weights``, ``algorithm``, ``environment``, ``tools`` and others; see
            ``SharedArguments``.

    Raises:
        ConfigError: invalid or conflicting options, before any weight is loaded where possible.
        DataError: invalid prompts.
    """

    SPEC = TrainerSpec(name="PPO", config=PPOConfig, algorithm=build_ppo, value_model=True)

    def __init__(  # noqa: PLR0913
        self,
        args: PPOConfig | None = None,
        processing_class: Any = None,
        model: str | nn.Module | None = None,
        ref_model: str | nn.Module | None = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: str | nn.Module | None = None,
        data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        reward_processing_class: Any = None,
        **shared: Unpack[SharedArguments],
    ) -> None:
        super().__init__(
            args,
            processing_class=processing_class,
            model=model,
            ref_model=ref_model,
            reward_model=reward_model,
            train_dataset=train_dataset,
            value_model=value_model,
            data_collator=data_collator,
            eval_dataset=eval_dataset,
            optimizers=optimizers,
            callbacks=callbacks,
            peft_config=peft_config,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_class,
            **shared,
        )
