"""Builds one reward source from models, functions, names or paths."""

from __future__ import annotations

import ast
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge import plugins
from kedge.models.load import (
    check_source,
    configuration_source,
    load_whole,
    tokenizer_beside,
)
from kedge.records.errors import ConfigError
from kedge.records.protocols import RewardInfo, check_declared, read_info
from kedge.rewards.function import RewardFunction, Signature, function_name
from kedge.rewards.mixture import Mixture
from kedge.rewards.model import RewardModel
from kedge.rewards.texts import TextCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions:
    """How reward models and functions score, and how their scores are combined."""

    policy_tokenizer: Any
    ends: Collection[int] = ()  # token ids that end responses; their texts leave them out
    weights: Sequence[float] | None = None  # one per source, models first; None: 1 each
    # Tokenizers of the reward models: one, one per model, or one per source (None: the policy's).
    # A model given by name uses the tokenizer in its folder or repository.
    tokenizers: Any = None
    missing_eos_penalty: float | None = None  # see `Mixture`, also for the next two
    non_eos_penalty: bool = False
    penalty_reward_value: float = -1.0
    # Of every reward model: those of `RewardModel`, and ``trust_remote_code`` (of its repository).
    models: Mapping[str, Any] = field(default_factory=dict)
    functions: Mapping[str, Any] = field(default_factory=dict)  # of every one; see `RewardFunction`


def reward_source(
    reward_model: Any,
    reward_funcs: Any,
    options: RewardOptions,
    *,
    device: torch.device | None = None,
    trainer_state: Callable[[], object] | None = None,
) -> Mixture:
    """Build one source from reward models and reward functions.

    Args:
        reward_model: a model, the name or path of one, or a list; also what ``reward_funcs`` takes.
        reward_funcs: callables, ``"package.module:function"`` or ``"file.py:function"`` strings,
            objects with a ``score(rollout)`` method, models, names or paths; one or a list.
        options: how they score.
        device: of the models; None leaves them where they are.
        trainer_state: returns what functions that ask for it get as ``trainer_state``.

    Raises:
        ConfigError: no source, an unsupported kind of source, or lists of different lengths.
    """
    texts, models = TextCache(options.policy_tokenizer, options.ends), options.models
    items = _items(reward_model, reward_funcs)
    factors = _weights(options.weights, len(items))
    loaded = [_load(item, models.get("trust_remote_code", False)) for item in items]
    own_tokenizers = _tokenizers(options.tokenizers, loaded)
    sources = []
    for item, given, tokenizer, weight in zip(items, loaded, own_tokenizers, factors, strict=True):
        source = given
        if isinstance(given, nn.Module):
            source = _build_model(item, given, tokenizer, texts, device=device, **models)
        elif not hasattr(given, "score"):
            source = RewardFunction(given, texts, trainer_state=trainer_state, **options.functions)
        name = read_info(source, RewardInfo).name or type(source).__name__
        sources.append((name, source, weight))
    return Mixture(
        sources,
        missing_eos_penalty=options.missing_eos_penalty,
        non_eos_penalty=options.non_eos_penalty,
        penalty_reward_value=options.penalty_reward_value,
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
        if isinstance(item, (str, Path)) and not _is_function(str(item)):
            check_name(str(item))
            continue  # a reward model
        source = _load(item, trust_remote_code=False)
        is_function = not isinstance(source, nn.Module) and not hasattr(source, "score")
        if is_function and dataset_columns is not None:
            Signature(source, function_name(source)).check(dataset_columns)


def _build_model(
    item: Any,
    model: nn.Module,
    tokenizer: Any,
    texts: TextCache,
    *,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> RewardModel:
    has_name = isinstance(item, (str, Path))
    if has_name and tokenizer is None:
        tokenizer = tokenizer_beside(str(item), trust_remote_code=trust_remote_code)
    options = {"policy_vocab_size": len(texts.tokenizer)} | options
    options["name"] = Path(item if has_name else getattr(model, "name_or_path", "") or "").name
    model = model if device is None else model.to(device)
    return RewardModel(model, tokenizer, texts=texts, **options)


def _items(reward_model: Any, reward_funcs: Any) -> list[Any]:
    items = [*as_list(reward_model), *as_list(reward_funcs)]
    if not items:
        raise ConfigError("no reward is configured: pass reward_model or reward_funcs")
    return items


def as_list(value: Any) -> list[Any]:
    """The items of a list or tuple, none for None; anything else becomes the only item."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _load(item: Any, trust_remote_code: bool) -> Any:
    if isinstance(item, (str, Path)):
        if _is_function(str(item)):
            return load_function(str(item))
        return load_model(str(item), trust_remote_code=trust_remote_code)
    if isinstance(item, nn.Module) or callable(getattr(item, "score", None)) or callable(item):
        check_declared(item, RewardInfo, "parallel", "begin", "reads_environments")
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
    if any(isinstance(weight, str) or not math.isfinite(weight) for weight in weights):
        raise ConfigError(f"reward_weights={list(weights)} must be finite numbers")
    return [float(weight) for weight in weights]


def _tokenizers(tokenizers: Any, loaded: list[Any]) -> list[Any]:
    """One tokenizer, or None, for each source."""
    models = [i for i, source in enumerate(loaded) if isinstance(source, nn.Module)]
    given = as_list(tokenizers)
    if len(given) == len(loaded):
        return given
    if given and len(given) != len(models):
        raise ConfigError(
            f"reward_processing_class has {len(given)} tokenizers for {len(models)} reward models"
            f" among {len(loaded)} reward sources; pass one per model, or one per source (None for"
            " functions)"
        )
    by_index = dict(zip(models, given, strict=False))
    return [by_index.get(i) for i in range(len(loaded))]


def _is_function(spec: str) -> bool:
    return names_function(spec) or spec in plugins.find("kedge.rewards")


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``"package.module:function"`` or ``"file.py:function"`` names.

    ``spec`` may also name an entry point of ``kedge.rewards``.
    """
    if (plugin := plugins.load("kedge.rewards", spec)) is not None:
        found: Callable[..., Any] = plugin
        return found
    where, _, name = spec.rpartition(":")
    try:
        module = plugins.load_module(where, "kedge_rewards")
    except Exception as error:
        raise ConfigError(
            f"reward function {spec!r}: cannot import {where!r}"
            f" ({type(error).__name__}: {error}); pass package.module:function or file.py:function"
        ) from error
    function = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        defined = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"reward function {spec!r}: {where!r} has no function {name!r}; it has"
            f" {', '.join(defined) or 'none'}"
        )
    return function


def names_function(spec: str) -> bool:
    """Whether ``spec`` is ``module:function`` and not the name or path of a model."""
    where, colon, name = spec.rpartition(":")
    return (
        bool(colon)
        and all(part.isidentifier() for part in name.split("."))
        and (where.endswith(".py") or all(part.isidentifier() for part in where.split(".")))
    )


def check_name(name: str) -> None:
    """Check that ``name`` can be that of a reward model, before anything is loaded."""
    path = Path(name).expanduser()
    if path.suffix == ".py" and not path.is_dir():
        functions: list[str] = []
        if path.is_file():
            with suppress(SyntaxError, ValueError):  # reported when it is imported
                body = ast.parse(path.read_bytes()).body
                functions = [x.name for x in body if isinstance(x, ast.FunctionDef)]
        public = [x for x in functions if not x.startswith("_")]
        has = f"it has {', '.join(public)}" if path.is_file() else "there is no such file"
        raise ConfigError(
            f"reward {name!r} names no function; write {name}:{(*public, 'function')[0]} ({has})"
        )
    try:
        check_source(name, "reward model")
    except ConfigError as error:
        raise ConfigError(f"{error}; a function is named file.py:function") from error


def load_model(name: str, *, trust_remote_code: bool = False, new_head: bool = False) -> Any:
    """A sequence-classification model from a folder or the hub, in float32.

    With ``new_head`` a model without a score head gets a randomly initialized one, with a warning.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    check_name(name)
    try:
        base, _ = configuration_source(name)
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        architectures = getattr(config, "architectures", None) or []
        options: dict[str, Any] = {}
        if not any("SequenceClassification" in kind for kind in architectures):
            options = {"num_labels": 1}
            if base != name:
                from peft import PeftConfig

                if PeftConfig.from_pretrained(name).task_type != "SEQ_CLS":
                    raise ConfigError(
                        f"reward model {name!r} is an adapter without a score head; train it with"
                        " task_type SEQ_CLS, as kedge reward --use_peft does"
                    )
                new_head = True  # the adapter has its own head
            elif new_head:
                logger.warning(
                    "reward model %s has no sequence-classification head (it is %s): adding a"
                    " randomly initialized one",
                    name,
                    ", ".join(architectures) or "of unknown type",
                )
        return load_whole(
            AutoModelForSequenceClassification,
            f"reward model {name!r}",
            name,
            new_head=new_head,
            dtype="float32",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **options,
        )
    except ConfigError:
        raise
    except Exception as error:  # readers of damaged files may raise anything
        raise ConfigError(
            f"reward model {name!r} cannot be loaded: {error}; pass the folder or hub name of a"
            " sequence-classification model, or module:function for a Python function"
        ) from error
