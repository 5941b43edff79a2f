"""PPO for language models, with a Trainer-style interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback

from kedge.algorithms import Algorithm, ppo
from kedge.config.ppo import PPOConfig
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine
from kedge.suggestions import named
from kedge.trainers.base import TrainerShell
from kedge.trainers.spec import TrainerSpec

_OLDER_NAMES = {
    "config": "args",
    "tokenizer": "processing_class",
    "policy": "model",
    "ref_policy": "ref_model",
}


@named("argument", config=PPOConfig)
class PPOTrainer(TrainerShell):
    """Trains a causal language model with PPO against a reward.

    Args:
        args: every option; see ``PPOConfig``.
        processing_class: the policy's tokenizer.  None: loaded with a model given by name.
        model: the policy: a model, a folder or a hub name.
        ref_model: the reference of the KL penalty.  None: a frozen copy of the policy, or with PEFT
            its base without adapter.
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
        reward_weights: weight of each source, models first; overrides ``PPOConfig``'s.
        reward_processing_class: tokenizers of reward models that differ from the policy's.
        rollout_engine: a rollout engine instead of the one that the config names.
        algorithm: a custom algorithm instead of PPO.
        environment: a class or function that makes a ``kedge.environments.Environment``, or a dict
            of them chosen by the column ``environment``; instead of the option of that name.
        tools: functions that the policy may call, with type hints and a Google-style docstring.
        environment_factory: makes objects whose methods are tools, with ``reset`` and perhaps
            ``get_reward``; or a dict of such functions chosen by the column ``environment``.
        rollout_func: ``f(prompts, trainer)`` that samples by itself; see
            ``kedge.environments.FunctionRollouts``.

    Raises:
        ConfigError: invalid or conflicting options, before any weight is loaded where possible.
        DataError: invalid prompts.
    """

    SPEC = TrainerSpec(name="PPO", config=PPOConfig, algorithm=ppo)

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
        reward_weights: Sequence[float] | None = None,
        reward_processing_class: Any = None,
        rollout_engine: RolloutEngine | None = None,
        algorithm: Algorithm | None = None,
        environment: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        rollout_func: Callable[[list[Any], Any], Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(locals() | {"reward_processing_classes": reward_processing_class})


class PPOv2Trainer(PPOTrainer):
    """``PPOTrainer`` under its older name; also accepts the older argument names.

    ``config``, ``tokenizer``, ``policy`` and ``ref_policy`` mean ``args``, ``processing_class``,
    ``model`` and ``ref_model``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for old, new in _OLDER_NAMES.items():
            if old in kwargs:
                if new in kwargs:
                    raise ConfigError(f"{old} is the older name of {new}; pass only one of them")
                kwargs[new] = kwargs.pop(old)
        super().__init__(*args, **kwargs)
