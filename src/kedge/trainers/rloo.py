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

# TRL up to 0.21: TRL 0.22 and later.
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

    Arguments are given by name, in the names of TRL up to 0.21 or of 0.22 and later.

    Args:
        model: the policy: a model, a folder or a hub name.
        reward_funcs: Python functions ``f(prompts, completions, **columns) -> list[float]``,
            ``"module:function"`` strings, reward models, folders or names, or a list of these.
        args: every option; see ``RLOOConfig``.
        train_dataset: prompts: a column ``prompt`` or ``query`` (text or chat messages), or
            ``input_ids``.
        eval_dataset: prompts for evaluation, or a dict of named ones.
        processing_class: the policy's tokenizer.  None loads the one that lies beside the model.
        reward_processing_classes: tokenizers of reward models that do not share the policy's.
        callbacks: ``transformers.TrainerCallback`` objects or classes.
        optimizers: your own ``(optimizer, lr_scheduler)``, each may be None.
        peft_config: trains an adapter of this kind on the policy.
        ref_model: what the KL penalty holds the policy to.  None: a frozen copy of the policy, or
            with PEFT its base without adapter.
        reward_weights: weight of each source; overrides ``RLOOConfig``'s.
        data_collator: pads a list of ``{"input_ids", "attention_mask"}``; None: Kedge's own.
        rollout_engine: samples instead of the embedded engine.
        algorithm: a algorithm of your own instead of RLOO.
        quantization_config: of transformers, for the base of an adapter whose model is given by
            name; needs ``peft_config``.
        older: the names of TRL up to 0.21: ``config``, ``tokenizer``, ``policy``, ``ref_policy``
            and ``reward_model``, which may also be a function of whole texts,
            ``f(list[str]) -> list[float]``.

    Raises:
        ConfigError: options that cannot work, names of both generations, or arguments without one.
        DataError: prompts that cannot be used.
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
                f"RLOOTrainer takes its arguments by name, and {len(unnamed)} came without: TRL's"
                " own order differs between 0.21 and 0.22; write model=, reward_funcs=, args=,"
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
        named = one_spelling(newer, older)
        options = checked(named["args"])
        if algorithm is not None:
            check_unread(options, algorithm)
        tokenizer = text_tokenizer(
            named["processing_class"],
            named["model"],
            trust=options.trust_remote_code,
            revision=init_kwargs(options).get("revision"),
        )
        rewards = named["reward_funcs"]
        if older.get("reward_model") is not None:
            rewards = of_texts(rewards, tokenizer)
        given = TrainerInputs(
            args=options,
            processing_class=own_or(named["processing_class"], tokenizer),
            model=named["model"],
            ref_model=named["ref_model"],
            train_dataset=train_dataset,
            data_collator=data_collator,
            eval_dataset=eval_dataset,
            optimizers=optimizers,
            callbacks=callbacks,
            peft_config=peft_config,
            reward_funcs=rewards,
            reward_weights=reward_weights,
            reward_processing_class=named["reward_processing_classes"],
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
        held = given.ref_model is not None or settings.kl.coef > 0
        rule = algorithm or rloo(**asdict(settings.rloo), reference=held)
        run = build_run(given, settings, rule, tokenizer=tokenizer, accelerator=accelerator)
        log_trl_names(run)
        super().__init__(run, given, "RLOO" if algorithm is None else algorithm.name)


def one_spelling(newer: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under their newer names.

    Raises:
        ConfigError: both names of one thing, or names of both generations.
    """
    found = dict(newer)
    for name, value in older.items():
        if value is None:
            continue
        if found[_PAIRS[name]] is not None:
            raise ConfigError(
                f"{name} and {_PAIRS[name]} are the older and the newer name of the same thing; "
                "give one of them"
            )
        other = next((n for n in _NEWER if newer.get(n) is not None), None)
        if other is not None and name != "tokenizer":
            was = next(old for old, new in _PAIRS.items() if new == other)
            raise ConfigError(
                f"{name} is a name of TRL up to 0.21 and {other} one of 0.22 and later; write"
                f" {_PAIRS[name]} for {name}, or {was} for {other}"
            )
        found[_PAIRS[name]] = value
    return found


def of_texts(reward: Any, tokenizer: Any) -> Any:
    """A reward of TRL up to 0.21; a function of whole texts is called as one of token ids."""
    if not callable(reward) or isinstance(reward, nn.Module):
        return reward

    def scored(prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[float]:
        rows = [a + b for a, b in zip(prompt_ids, completion_ids, strict=True)]
        scores: list[float] = reward(tokenizer.batch_decode(rows, skip_special_tokens=True))
        return scores

    scored.__name__ = getattr(reward, "__name__", type(reward).__name__)
    return scored


def checked(args: Any) -> RLOOConfig:
    """The config, or defaults.

    Raises:
        ConfigError: something else was passed.
    """
    if args is None:
        return RLOOConfig()
    if not isinstance(args, RLOOConfig):
        raise ConfigError(
            f"args is a {type(args).__name__}; kedge.RLOOTrainer takes a kedge.RLOOConfig"
        )
    return args
