"""Builds one reward source from models, functions, names or paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from kedge.backends.rewards.call import Signature, function_name
from kedge.backends.rewards.eos import EosPenalty
from kedge.backends.rewards.function import OnError, RewardFunction
from kedge.backends.rewards.load import (
    load_function,
    load_model,
    load_tokenizer,
    names_function,
)
from kedge.backends.rewards.log import RewardLog
from kedge.backends.rewards.mixture import Mixture
from kedge.backends.rewards.model import RewardModel
from kedge.backends.rewards.texts import TextCache
from kedge.errors import ConfigError
from kedge.protocols import RewardSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How reward models are loaded and run; see :class:`RewardModel`."""

    chunk_rows: int = 64  # rows scored at a time
    max_length: int | None = None  # tokens; longer rows lose their first ones
    reward_label: int | str | None = None  # which label is the reward if there are several
    autocast: torch.dtype | None = None
    device: torch.device | None = None  # None leaves models where they are
    policy_vocab_size: int | None = None  # None: the length of the policy's tokenizer
    trust_remote_code: bool = False  # run code from a model's repository


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionOptions:
    """How reward functions are called; see :class:`RewardFunction`."""

    on_error: OnError = "raise"
    error_score: float | None = None
    log: RewardLog | None = None
    trainer_state: Callable[[], object] | None = None
    dataset_columns: Collection[str] | None = None  # of the prompts; None: unchecked
    skip_special_tokens: bool = True  # leave tokens such as eos out of the text


def reward_source(
    reward_model: Any = None,
    reward_funcs: Any = None,
    *,
    policy_tokenizer: Any,
    weights: Sequence[float] | None = None,
    tokenizers: Any = None,
    models: ModelOptions | None = None,
    functions: FunctionOptions | None = None,
    on_unscored: Literal["drop", "raise"] = "drop",
    missing_eos_penalty: float | None = None,
    non_eos_penalty: bool = False,
    penalty_reward_value: float = -1.0,
) -> RewardSource:
    """Build one source from reward models and reward functions.

    Args:
        reward_model: a model, the name or path of one, or a list; also what ``reward_funcs`` takes.
        reward_funcs: callables, ``"package.module:function"`` or ``"file.py:function"`` strings,
            objects with a ``score(rollout)`` method, models, names or paths; one or a list.
        policy_tokenizer: tokenizer of the policy.
        weights: one per source, models first; None: 1 for every source.
        tokenizers: tokenizers of the reward models: one, one per model, or one per source (None:
            the policy's).  A model given by name uses the tokenizer in its folder or repository.
        models: options of every reward model.
        functions: options of every reward function.
        on_unscored: see :class:`Mixture`.
        missing_eos_penalty: see :class:`EosPenalty`.
        non_eos_penalty: see :class:`EosPenalty`.
        penalty_reward_value: see :class:`EosPenalty`.

    Raises:
        ConfigError: no source, an unsupported kind of source, or lists of different lengths.
    """
    items = _items(reward_model, reward_funcs)
    builder = _Builder(models or ModelOptions(), functions or FunctionOptions(), policy_tokenizer)
    mixture: RewardSource = Mixture(
        builder.sources(items, _weights(weights, len(items)), tokenizers), on_unscored=on_unscored
    )
    if missing_eos_penalty is None and not non_eos_penalty:
        return mixture
    return EosPenalty(
        mixture,
        missing_eos_penalty=missing_eos_penalty,
        non_eos_penalty=non_eos_penalty,
        penalty_reward_value=penalty_reward_value,
    )


def check_sources(
    reward_model: Any,
    reward_funcs: Any,
    *,
    weights: Sequence[float] | None = None,
    dataset_columns: Collection[str] | None = None,
) -> None:
    """Check the sources as far as possible without loading models; see ``reward_source``.

    Raises:
        ConfigError: as ``reward_source``.
    """
    items = _items(reward_model, reward_funcs)
    _weights(weights, len(items))
    for item in items:
        if isinstance(item, (str, Path)) and not names_function(str(item)):
            continue  # a model
        source = _load(item, trust_remote_code=False)
        is_function = not isinstance(source, nn.Module) and not hasattr(source, "score")
        if is_function and dataset_columns is not None:
            Signature(source, function_name(source)).check(dataset_columns)


class _Builder:
    def __init__(self, models: ModelOptions, functions: FunctionOptions, policy: Any) -> None:
        self._models, self._functions = models, functions
        self._texts = TextCache(policy, skip_special_tokens=functions.skip_special_tokens)

    def sources(
        self, items: list[Any], weights: list[float], tokenizers: Any
    ) -> list[tuple[str, RewardSource, float]]:
        loaded = [_load(item, self._models.trust_remote_code) for item in items]
        model_tokenizers = _tokenizers(tokenizers, loaded)
        triples = zip(items, loaded, model_tokenizers, strict=True)
        sources = [self._build(*triple) for triple in triples]
        return [
            (getattr(source, "name", type(source).__name__), source, weight)
            for source, weight in zip(sources, weights, strict=True)
        ]

    def _build(self, item: Any, source: Any, tokenizer: Any) -> RewardSource:
        if isinstance(source, nn.Module):
            return self._build_model(item, source, tokenizer)
        if hasattr(source, "score"):
            return source
        options = self._functions
        return RewardFunction(
            source,
            self._texts,
            on_error=options.on_error,
            error_score=options.error_score,
            log=options.log,
            trainer_state=options.trainer_state,
            dataset_columns=options.dataset_columns,
        )

    def _build_model(self, item: Any, model: nn.Module, tokenizer: Any) -> RewardModel:
        options, size = self._models, self._models.policy_vocab_size
        has_name = isinstance(item, (str, Path))
        if has_name and tokenizer is None:
            tokenizer = load_tokenizer(str(item), trust_remote_code=options.trust_remote_code)
        return RewardModel(
            model if options.device is None else model.to(options.device),
            tokenizer,
            texts=self._texts,
            policy_vocab_size=len(self._texts.tokenizer) if size is None else size,
            chunk_rows=options.chunk_rows,
            max_length=options.max_length,
            reward_label=options.reward_label,
            autocast=options.autocast,
            name=Path(item if has_name else getattr(model, "name_or_path", "") or "").name or None,
        )


def _items(reward_model: Any, reward_funcs: Any) -> list[Any]:
    items = [*_list(reward_model), *_list(reward_funcs)]
    if not items:
        raise ConfigError("no reward is configured: pass reward_model or reward_funcs")
    return items


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _load(item: Any, trust_remote_code: bool) -> Any:
    if isinstance(item, Path):
        item = str(item)
    if isinstance(item, str):
        if names_function(item):
            return load_function(item)
        return load_model(item, trust_remote_code=trust_remote_code)
    if isinstance(item, nn.Module) or callable(getattr(item, "score", None)) or callable(item):
        return item
    raise ConfigError(
        "a reward must be a model, its name or path, a function, 'module:function', or an object"
        f" with a score(rollout) method, got {type(item).__name__} ({item!r})"
    )


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        raise ConfigError(
            f"reward_weights must have one number per reward source (models first, then functions):"
            f" got {len(weights)} for {count} sources"
        )
    for weight in weights:
        if isinstance(weight, str) or not math.isfinite(weight):
            raise ConfigError(
                f"reward_weights={list(weights)}: each must be a finite number, got {weight!r}"
            )
    return [float(weight) for weight in weights]


def _tokenizers(tokenizers: Any, loaded: list[Any]) -> list[Any]:
    models = [i for i, source in enumerate(loaded) if isinstance(source, nn.Module)]
    given = _list(tokenizers)
    if not given:
        return [None] * len(loaded)
    if len(given) == len(loaded):
        return given
    if len(given) == len(models):
        by_index = dict(zip(models, given, strict=True))
        return [by_index.get(i) for i in range(len(loaded))]
    raise ConfigError(
        f"reward_processing_class has {len(given)} tokenizers for {len(models)} reward models among"
        f" {len(loaded)} reward sources; pass one per model, or one per source (None for functions)"
    )
