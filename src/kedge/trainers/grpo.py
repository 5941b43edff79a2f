"""GRPO for language models: advantages relative to the other responses to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback

from kedge.algorithms import Algorithm, grpo
from kedge.config.grpo import GRPOConfig
from kedge.protocols import RolloutEngine
from kedge.suggestions import named
from kedge.trainers.base import TrainerShell
from kedge.trainers.metric_names import log_trl_names
from kedge.trainers.spec import TrainerSpec


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
        environment: a class or function that makes a ``kedge.environments.Environment``, or a dict
            of them chosen by the column ``environment``; instead of the option of that name.
        tools: functions that the policy may call, with type hints and a Google-style docstring.
        environment_factory: makes objects whose methods are tools, with ``reset`` and perhaps
            ``get_reward``; or a dict of such functions chosen by the column ``environment``.
        rollout_func: ``f(prompts, trainer)`` that samples by itself; see
            ``kedge.environments.FunctionRollouts``.
        quantization_config: transformers' configuration for a policy given by name; needs
            ``peft_config``.

    Raises:
        ConfigError: invalid or conflicting options, before any weight is loaded where possible.
        DataError: invalid prompts.
    """

    SPEC = TrainerSpec(name="GRPO", config=GRPOConfig, algorithm=grpo, metric_names=log_trl_names)

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
        environment: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        rollout_func: Callable[[list[Any], Any], Mapping[str, Any]] | None = None,
        quantization_config: Any = None,
    ) -> None:
        super().__init__(locals())
