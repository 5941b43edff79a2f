"""Environments of a run: from the arguments of a trainer to a rollout engine around the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kedge.backends.data.encode import SOURCES
from kedge.backends.data.table import read_table
from kedge.config.environments import EnvironmentArguments
from kedge.config.rollout import json_object
from kedge.environments import (
    EnvironmentRollouts,
    EpisodeReward,
    FunctionRollouts,
    tool_environments,
)
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine
from kedge.trainers.build.inputs import TrainerInputs
from kedge.types import Sampling

_EMPTY = [{"role": "user", "content": ""}]
Make = Callable[[], Any] | Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """The environments that the policy plays in; none if ``make`` is None."""

    inputs: TrainerInputs  # with the reward, the prompts and the engine that environments imply
    make: Make | None = None

    def check(self, sampling: Sampling) -> None:
        """Check that turns can end.

        Raises:
            ConfigError: nothing ends a turn before the tokens of the episode are spent.
        """
        ends = sampling.stop_ids or sampling.stop_strings or self.inputs.args.max_turn_tokens
        if self.make is not None and not ends:
            raise ConfigError(
                "environments need turns that end, but there is no stop token: set"
                " stop_token='eos', stop_token_ids, stop_strings or max_turn_tokens"
            )

    def wrap(
        self, engine: RolloutEngine, tokenizer: Any, *, pad_id: int, extra_slot: bool
    ) -> RolloutEngine:
        """``engine``, playing in the environments."""
        if self.make is None:
            return engine
        args = self.inputs.args
        return EnvironmentRollouts(
            engine,
            self.make,
            tokenizer,
            chat_template_kwargs=json_object("chat_template_kwargs", args.chat_template_kwargs),
            pad_id=pad_id,
            extra_slot=extra_slot,
            max_turns=args.max_turns,
            max_turn_tokens=args.max_turn_tokens,
            max_seconds=args.max_episode_seconds,
            timeout=args.environment_timeout,
            max_concurrency=args.environment_concurrency,
            on_env_error=args.on_env_error,
            env_error_score=args.env_error_score,
        )


def find_environments(inputs: TrainerInputs) -> Environments:
    """The environments that the arguments or the config name, checked.

    Raises:
        ConfigError: several kinds at once, a class that cannot be imported or is not an
            environment, a function without a schema, or no reward.
    """
    args = inputs.args
    _check_one_kind(inputs)
    if inputs.rollout_func is not None:
        if args.max_lag:
            raise ConfigError(
                f"rollout_func samples with the weights that are being trained, so max_lag must be"
                f" 0, got {args.max_lag}"
            )
        _check_unread(args)
        engine = FunctionRollouts(inputs.rollout_func, lambda: inputs.trainer, pad_id=0)
        return Environments(inputs=replace(inputs, rollout_engine=engine))
    scored = True
    if inputs.tools or inputs.environment_factory:
        make: Make = tool_environments(
            inputs.tools or (),
            inputs.environment_factory,
            max_iterations=args.max_tool_calling_iterations,
        )
        scored = _gives_rewards(make)
    elif inputs.environment is not None or args.environment is not None:
        make = _environment(inputs)
    else:
        _check_unread(args)
        return Environments(inputs=inputs)
    rewards = _listed(inputs.reward_funcs)
    if not scored and not rewards and inputs.reward_model is None:
        raise ConfigError(
            "no reward is configured: pass reward_funcs, or an environment_factory whose class has"
            " a method get_reward"
        )
    changed = {
        "reward_funcs": [*rewards, EpisodeReward()],
        "train_dataset": _prompts(inputs),
        "eval_dataset": _filled(inputs, inputs.eval_dataset),
        "reward_weights": _weights(inputs, rewards),
    }
    return Environments(inputs=replace(inputs, **changed), make=make)


def _check_one_kind(inputs: TrainerInputs) -> None:
    kinds = {
        "environment": inputs.environment,
        "environment (option)": inputs.args.environment,
        "rollout_func": inputs.rollout_func,
        "tools or environment_factory": inputs.tools or inputs.environment_factory,
    }
    named = [name for name, value in kinds.items() if value]
    if len(named) > 1 or (inputs.rollout_func is not None and inputs.rollout_engine is not None):
        both = [*named, *(["rollout_engine"] if inputs.rollout_func is not None else [])]
        raise ConfigError(
            f"{' and '.join(both[:2])} both decide how episodes are sampled; pass one"
        )
    if inputs.args.environment_kwargs is not None and not (
        inputs.args.environment or inputs.environment
    ):
        raise ConfigError("environment_kwargs needs environment; set it, or leave the kwargs out")


def _check_unread(args: Any) -> None:
    """Reject options of environments in a run that has none."""
    for name, field in EnvironmentArguments.__dataclass_fields__.items():
        value = getattr(args, name)
        if value != field.default:
            raise ConfigError(
                f"{name}={value!r} has no effect without an environment; leave it out, or pass"
                " environment, tools or environment_factory"
            )


def _environment(inputs: TrainerInputs) -> Make:
    """The factory that ``environment`` names or is."""
    made, args = inputs.environment, inputs.args
    kwargs = json_object("environment_kwargs", args.environment_kwargs)
    if isinstance(made, Mapping):
        for key, each in made.items():
            _check_factory(f"environment[{key!r}]", each)
        return {key: partial(each, **kwargs) for key, each in made.items()}
    name = args.environment if made is None else made
    factory: Any = _load(name) if isinstance(name, str) else name
    _check_factory("environment", factory)
    return partial(factory, **kwargs)


def _load(name: str) -> Any:
    from kedge.backends.rewards.load import load_module

    where, colon, attribute = name.rpartition(":")
    try:
        found = load_module(where, "kedge_environments") if colon else None
    except Exception as error:  # whatever the user's file raises
        raise ConfigError(
            f"environment={name!r}: cannot import {where!r} ({type(error).__name__}: {error})"
        ) from error
    if not hasattr(found, attribute):
        raise ConfigError(
            f"environment={name!r} must be module:Class or file.py:Class"
            + (f"; {where!r} does not define {attribute!r}" if colon else "")
        )
    return getattr(found, attribute)


def _check_factory(name: str, factory: Any) -> None:
    if not callable(factory):
        raise ConfigError(
            f"{name} must be a class or a function that makes an environment, since every episode"
            f" needs one; got a {type(factory).__name__}"
        )
    missing = [m for m in ("reset", "step") if not hasattr(factory, m)]
    if inspect.isclass(factory) and missing:
        raise ConfigError(
            f"{name}={factory.__name__} must have the methods reset and step, {missing[0]} is"
            " missing; a class whose methods are tools is passed as environment_factory="
        )


def _gives_rewards(make: Make) -> bool:
    """Make one environment of each kind, which checks its tools; whether any gives rewards."""
    factories = list(make.values()) if isinstance(make, Mapping) else [make]
    scored = False
    for factory in factories:
        made = factory()
        scored |= made.gives_rewards
        made.close()
    return scored


def _prompts(inputs: TrainerInputs) -> Any:
    """The dataset; without one a single row, whose prompt ``reset`` gives."""
    if inputs.train_dataset is not None:
        return _filled(inputs, inputs.train_dataset)
    args = inputs.args
    if isinstance(inputs.environment_factory, Mapping) or isinstance(inputs.environment, Mapping):
        raise ConfigError(
            "several environments need a train_dataset with a column 'environment', which names"
            " that of each row"
        )
    if args.max_steps <= 0 and args.total_episodes is None:
        raise ConfigError("without a train_dataset, set max_steps or total_episodes")
    return [{"prompt": _EMPTY}]


def _filled(inputs: TrainerInputs, dataset: Any) -> Any:
    """The dataset; rows that only have columns for ``reset`` get an empty user message."""
    if dataset is None or isinstance(dataset, Mapping) or inputs.data_collator is not None:
        return dataset
    if inputs.tools and not inputs.environment_factory:
        return dataset  # tools do not give prompts
    table = read_table(dataset)
    if {*SOURCES} & {*table.names}:
        return dataset
    columns = table.take(range(len(table)), table.names)
    return {**columns, "prompt": [_EMPTY] * len(table)}


def _listed(rewards: Any) -> list[Any]:
    if rewards is None:
        return []
    return list(rewards) if isinstance(rewards, list | tuple) else [rewards]


def _weights(inputs: TrainerInputs, rewards: Sequence[Any]) -> Sequence[float] | None:
    """The weights of the user's sources, and 1 for the environments if they are left out."""
    weights = inputs.args.reward_weights if inputs.reward_weights is None else inputs.reward_weights
    count = len(rewards) + len(_listed(inputs.reward_model))
    return [*weights, 1.0] if weights is not None and len(weights) == count else weights
