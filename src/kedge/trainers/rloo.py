"""RLOO for language models: several responses per prompt instead of a value model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback

from kedge.algorithms import Algorithm, rloo
from kedge.config.rloo import RLOOConfig
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine
from kedge.suggestions import named
from kedge.trainers.base import TrainerShell
from kedge.trainers.build.loading import load_tokenizer, own_or
from kedge.trainers.metric_names import log_trl_names
from kedge.trainers.spec import TrainerSpec

# Name in TRL up to 0.21 -> name in TRL 0.22 and later.
_PAIRS = {
    "config": "args",
    "tokenizer": "processing_class",
    "policy": "model",
    "ref_policy": "ref_model",
    "reward_model": "reward_funcs",
}
_NEWER = ("model", "reward_funcs", "args")


@named("argument", config=RLOOConfig, older=_PAIRS)
class RLOOTrainer(TrainerShell):
    """Trains a causal language model with RLOO against a reward.

    Arguments are keywords, with the names of TRL up to 0.21 or of TRL 0.22 and later.

    Args:
        model: the policy: a model, a folder or a hub name.
        reward_funcs: Python functions ``f(prompts, completions, **columns) -> list[float]``,
            ``"module:function"`` strings, reward models, folders or names, or a list of these.
        args: every option; see ``RLOOConfig``.
        train_dataset: prompts in a column ``prompt`` or ``query`` (text or chat messages), or
            ``input_ids``.
        eval_dataset: evaluation prompts, or a dict of named datasets.
        processing_class: the policy's tokenizer.  None: loaded with the model.
        reward_processing_classes: tokenizers of reward models that differ from the policy's.
        callbacks: ``transformers.TrainerCallback`` objects or classes.
        optimizers: a custom pair ``(optimizer, lr_scheduler)``; None for the default.
        peft_config: trains this adapter on the policy.
        ref_model: the reference of the KL penalty.  None: a frozen copy of the policy, or with PEFT
            its base without adapter.
        reward_weights: weight of each source; overrides ``RLOOConfig``'s.
        data_collator: pads a list of ``{"input_ids", "attention_mask"}``; None: the built-in one.
        rollout_engine: a rollout engine instead of the one that the config names.
        algorithm: a custom algorithm instead of RLOO.
        environment: a class or function that makes a ``kedge.environments.Environment``, or a dict
            of them chosen by the column ``environment``; instead of the option of that name.
        tools: functions that the policy may call, with type hints and a Google-style docstring.
        environment_factory: makes objects whose methods are tools, with ``reset`` and perhaps
            ``get_reward``; or a dict of such functions chosen by the column ``environment``.
        rollout_func: ``f(prompts, trainer)`` that samples by itself; see
            ``kedge.environments.FunctionRollouts``.
        quantization_config: transformers' configuration for a policy given by name; needs
            ``peft_config``.
        older: the names of TRL up to 0.21: ``config``, ``tokenizer``, ``policy``, ``ref_policy``
            and ``reward_model``, which may also be a function of texts (prompt and completion),
            ``f(list[str]) -> list[float]``.

    Raises:
        ConfigError: invalid or conflicting options, mixed names of both TRL versions, or positional
            arguments.
        DataError: invalid prompts.
    """

    SPEC = TrainerSpec(name="RLOO", config=RLOOConfig, algorithm=rloo, metric_names=log_trl_names)

    def __init__(  # noqa: PLR0913
        self,
        *unnamed: Any,
        model: str | nn.Module | None = None,
        reward_funcs: Any = None,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
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
        **older: Any,
    ) -> None:
        if unnamed:
            raise ConfigError(
                f"RLOOTrainer takes keyword arguments only, got {len(unnamed)} positional: their"
                " order differs between TRL 0.21 and 0.22; use model=, reward_funcs=, args=,"
                " train_dataset= (or policy=, reward_model=, config=)"
            )
        arguments = one_spelling(locals(), older)
        if older.get("reward_model") is not None:
            processor = arguments["processing_class"]
            tokenizer = load_tokenizer(processor, arguments["model"], arguments["args"])
            arguments["processing_class"] = own_or(processor, tokenizer)
            arguments["reward_funcs"] = of_texts(arguments["reward_funcs"], tokenizer)
        super().__init__(arguments)


def one_spelling(newer: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under their newer names.

    Raises:
        ConfigError: both names of one argument, or names of both TRL versions.
    """
    arguments = dict(newer)
    for name, value in older.items():
        if value is None:
            continue
        if arguments[_PAIRS[name]] is not None:
            raise ConfigError(
                f"{name} and {_PAIRS[name]} are the older and the newer name of the same argument; "
                "pass only one of them"
            )
        other = next((n for n in _NEWER if newer.get(n) is not None), None)
        if other is not None and name != "tokenizer":
            older_name = next(old for old, new in _PAIRS.items() if new == other)
            raise ConfigError(
                f"{name} is a name of TRL up to 0.21 and {other} of 0.22 and later; use"
                f" {_PAIRS[name]} for {name}, or {older_name} for {other}"
            )
        arguments[_PAIRS[name]] = value
    return arguments


def of_texts(reward: Any, tokenizer: Any) -> Any:
    """Adapt a reward of TRL up to 0.21: a function of texts becomes one of token ids."""
    if not callable(reward) or isinstance(reward, nn.Module):
        return reward

    def scored(prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[float]:
        rows = [a + b for a, b in zip(prompt_ids, completion_ids, strict=True)]
        scores: list[float] = reward(tokenizer.batch_decode(rows, skip_special_tokens=True))
        return scores

    scored.__name__ = getattr(reward, "__name__", type(reward).__name__)
    return scored
