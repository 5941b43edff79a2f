"""RLOO for language models: several responses per prompt instead of a value model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback
from typing_extensions import Unpack

from kedge.algorithms import rloo
from kedge.config.rloo import RLOOConfig
from kedge.errors import ConfigError
from kedge.suggestions import named
from kedge.trainers.assembly.setup import find_tokenizer, own_or
from kedge.trainers.base import TrainerShell
from kedge.trainers.metric_names import log_trl_names
from kedge.trainers.spec import SharedArguments, TrainerSpec

# Name in TRL up to 0.21 -> name in TRL 0.22 and later.
_PAIRS = {
    "config": "args",
    "tokenizer": "processing_class",
    "policy": "model",
    "ref_policy": "ref_model",
    "reward_model": "reward_funcs",
}
_NEWER = ("model", "reward_funcs", "args")


class RLOOArguments(SharedArguments, total=False):
    """The keyword arguments of ``RLOOTrainer``, in addition to those of every trainer.

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
        ref_model: the reference of the KL penalty.  None: a frozen copy of the policy; under a
            new adapter its base, which is the same.
        data_collator: pads a list of ``{"input_ids", "attention_mask"}``; None: the built-in one.
        config, tokenizer, policy, ref_policy, reward_model: the names of TRL up to 0.21;
            ``reward_model`` may also be a function of texts (prompt and completion),
            ``f(list[str]) -> list[float]``.
    """

    model: str | nn.Module | None
    reward_funcs: Any
    args: RLOOConfig | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    reward_processing_classes: Any
    callbacks: list[TrainerCallback] | None
    optimizers: tuple[Any, Any]
    peft_config: Any
    ref_model: str | nn.Module | None
    data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None
    config: RLOOConfig | None
    tokenizer: Any
    policy: str | nn.Module | None
    ref_policy: str | nn.Module | None
    reward_model: Any


@named("argument", config=RLOOConfig, also=RLOOArguments.__optional_keys__)
class RLOOTrainer(TrainerShell):
    """Trains a causal language model with RLOO against a reward.

    Arguments are keywords, with the names of TRL up to 0.21 or of TRL 0.22 and later.

    Args:
        unnamed: refused.
        arguments: see ``RLOOArguments``.

    Raises:
        ConfigError: invalid or conflicting options, mixed names of both TRL versions, or positional
            arguments.
        DataError: invalid prompts.
    """

    SPEC = TrainerSpec(name="RLOO", config=RLOOConfig, algorithm=rloo, metric_names=log_trl_names)

    def __init__(self, *unnamed: Any, **arguments: Unpack[RLOOArguments]) -> None:
        if unnamed:
            raise ConfigError(
                f"RLOOTrainer takes keyword arguments only, got {len(unnamed)} positional: their"
                " order differs between TRL 0.21 and 0.22; use model=, reward_funcs=, args=,"
                " train_dataset= (or policy=, reward_model=, config=)"
            )
        newer = one_spelling(arguments)
        args = newer.pop("args", None)
        if arguments.get("reward_model") is not None:
            processor = newer.get("processing_class")
            tokenizer = find_tokenizer(processor, newer.get("model"), args)
            newer["processing_class"] = own_or(processor, tokenizer)
            newer["reward_funcs"] = of_texts(newer["reward_funcs"], tokenizer)
        super().__init__(args, **newer)


def one_spelling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under their newer names.

    Raises:
        ConfigError: both names of one argument, or names of both TRL versions.
    """
    newer = {name: value for name, value in arguments.items() if name not in _PAIRS}
    other = next((name for name in _NEWER if newer.get(name) is not None), None)
    for older, name in _PAIRS.items():
        if arguments.get(older) is None:
            continue
        if newer.get(name) is not None:
            raise ConfigError(
                f"{older} and {name} are the older and the newer name of the same argument; "
                "pass only one of them"
            )
        if other is not None and older != "tokenizer":
            older_name = next(old for old, new in _PAIRS.items() if new == other)
            raise ConfigError(
                f"{older} is a name of TRL up to 0.21 and {other} of 0.22 and later; use"
                f" {name} for {older}, or {older_name} for {other}"
            )
        newer[name] = arguments[older]
    return newer


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
