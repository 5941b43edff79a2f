"""RLOO for language models: several responses per prompt instead of a value model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn
from transformers import TrainerCallback

from kedge.algorithms import Algorithm, rloo
from kedge.backends.hf.distributed import accelerator_for
from kedge.config.rloo import RLOOConfig, resolve_rloo
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
        quantization_config: Any = None,
        **older: Any,
    ) -> None:
        if unnamed:
            raise ConfigError(
                f"RLOOTrainer takes keyword arguments only, got {len(unnamed)} positional: their"
                " order differs between TRL 0.21 and 0.22; use model=, reward_funcs=, args=,"
                " train_dataset= (or policy=, reward_model=, config=)"
            )
        newer = {
            "args": args,
            "processing_class": processing_class,
            "model": model,
            "ref_model": ref_model,
            "reward_funcs": reward_funcs,
            "reward_processing_classes": reward_processing_classes,
        }
        arguments = one_spelling(newer, older)
        options = checked(arguments["args"])
        if algorithm is not None:
            check_unread(options, algorithm)
        tokenizer = text_tokenizer(
            arguments["processing_class"],
            arguments["model"],
            trust=options.trust_remote_code,
            revision=init_kwargs(options).get("revision"),
        )
        rewards = arguments["reward_funcs"]
        if older.get("reward_model") is not None:
            rewards = of_texts(rewards, tokenizer)
        given = TrainerInputs(
            args=options,
            processing_class=own_or(arguments["processing_class"], tokenizer),
            model=arguments["model"],
            ref_model=arguments["ref_model"],
            train_dataset=train_dataset,
            data_collator=data_collator,
            eval_dataset=eval_dataset,
            optimizers=optimizers,
            callbacks=callbacks,
            peft_config=peft_config,
            reward_funcs=rewards,
            reward_weights=reward_weights,
            reward_processing_class=arguments["reward_processing_classes"],
            rollout_engine=rollout_engine,
            quantization_config=quantization_config,
        )
        configure_process(options)
        accelerator = accelerator_for(options)
        settings = resolve_rloo(
            options,
            world_size=accelerator.num_processes,
            eos_token_ids=end_tokens(given, tokenizer),
        )
        reference = given.ref_model is not None or settings.kl.coef > 0
        chosen = algorithm or rloo(**asdict(settings.rloo), reference=reference)
        run = build_run(given, settings, chosen, tokenizer=tokenizer, accelerator=accelerator)
        log_trl_names(run)
        super().__init__(run, given, "RLOO" if algorithm is None else algorithm.name)


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


def checked(args: Any) -> RLOOConfig:
    """The config, or the default one for None.

    Raises:
        ConfigError: it has another type.
    """
    if args is None:
        return RLOOConfig()
    if not isinstance(args, RLOOConfig):
        raise ConfigError(f"args must be a kedge.RLOOConfig, got a {type(args).__name__}")
    return args
