"""GRPO for language models: advantages relative to the other responses to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn
from transformers import TrainerCallback

from kedge.algorithms import Algorithm, grpo
from kedge.backends.hf.distributed import accelerator_for
from kedge.config.grpo import GRPOConfig, resolve_grpo
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine
from kedge.suggestions import named
from kedge.trainers.base import TrainerShell, configure_process
from kedge.trainers.build.algorithm import check_unread
from kedge.trainers.build.build import build_run
from kedge.trainers.build.data import own_or, text_tokenizer
from kedge.trainers.build.inputs import TrainerInputs
from kedge.trainers.build.models import end_tokens, init_kwargs
from kedge.trainers.trl_names import log_trl_names


@named("argument", config=GRPOConfig)
class GRPOTrainer(TrainerShell):
    """Trains a causal language model with GRPO, or one of its variants, against a reward.

    Args:
        model: the policy: a model, a folder or a hub name.
        reward_funcs: Python functions ``f(prompts, completions, **columns) -> list[float]``,
            ``"module:function"`` strings, reward models, folders or names, or a list of these.
        args: every option; see ``GRPOConfig``.
        train_dataset: prompts in a column ``prompt`` or ``query`` (text or chat messages), or
            ``input_ids``.
        eval_dataset: evaluation prompts, or a dict of named datasets.
        processing_class: the policy's tokenizer.  None: loaded with the model.
        reward_processing_classes: tokenizers of reward models that differ from the policy's.
        callbacks: ``transformers.TrainerCallback`` objects or classes.
        optimizers: a custom pair ``(optimizer, lr_scheduler)``; None for the default.
        peft_config: trains this adapter on the policy.
        ref_model: the reference of the KL terms.  None: if ``beta`` or ``kl_coef`` is above 0, a
            frozen copy of the policy, or with PEFT its base without adapter.
        reward_weights: weight of each source; overrides ``GRPOConfig``'s.
        data_collator: pads a list of ``{"input_ids", "attention_mask"}``; None: the built-in one.
        rollout_engine: a rollout engine instead of the one that the config names.
        algorithm: a custom algorithm instead of GRPO.
        quantization_config: transformers' configuration for a policy given by name; needs
            ``peft_config``.

    Raises:
        ConfigError: invalid or conflicting options, before any weight is loaded where possible.
        DataError: invalid prompts.
    """

    def __init__(  # noqa: PLR0913
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
        reward_weights: Sequence[float] | None = None,
        data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
        rollout_engine: RolloutEngine | None = None,
        algorithm: Algorithm | None = None,
        quantization_config: Any = None,
    ) -> None:
        options = checked(args)
        if algorithm is not None:
            check_unread(options, algorithm)
        tokenizer = text_tokenizer(
            processing_class,
            model,
            trust=options.trust_remote_code,
            revision=init_kwargs(options).get("revision"),
        )
        given = TrainerInputs(
            args=options,
            processing_class=own_or(processing_class, tokenizer),
            model=model,
            ref_model=ref_model,
            train_dataset=train_dataset,
            data_collator=data_collator,
            eval_dataset=eval_dataset,
            optimizers=optimizers,
            callbacks=callbacks,
            peft_config=peft_config,
            reward_funcs=reward_funcs,
            reward_weights=reward_weights,
            reward_processing_class=reward_processing_classes,
            rollout_engine=rollout_engine,
            quantization_config=quantization_config,
        )
        configure_process(options)
        accelerator = accelerator_for(options)
        settings = resolve_grpo(
            options,
            world_size=accelerator.num_processes,
            eos_token_ids=end_tokens(given, tokenizer),
        )
        reference = ref_model is not None or settings.kl.coef > 0 or settings.grpo.beta > 0
        chosen = algorithm or grpo(
            **asdict(settings.grpo),
            reference=reference,
        )
        run = build_run(given, settings, chosen, tokenizer=tokenizer, accelerator=accelerator)
        log_trl_names(run)
        super().__init__(run, given, "GRPO" if algorithm is None else algorithm.name)


def checked(args: Any) -> GRPOConfig:
    """The config, or the default one for None.

    Raises:
        ConfigError: it has another type.
    """
    if args is None:
        return GRPOConfig()
    if not isinstance(args, GRPOConfig):
        raise ConfigError(f"args must be a kedge.GRPOConfig, got a {type(args).__name__}")
    return args
