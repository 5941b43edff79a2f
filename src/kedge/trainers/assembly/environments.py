"""Builds environments from a trainer's arguments, and wraps the rollout engine in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kedge import plugins
from kedge.background import CallThread
from kedge.chat_template import TOOLS, template_options
from kedge.config.common import EnvironmentArguments
from kedge.config.declare import read_mapping
from kedge.data import DatasetPrompts
from kedge.data.encode import SOURCES, read_table
from kedge.environments import (
    EnvironmentRollouts,
    EpisodeLimits,
    EpisodeReward,
    FunctionRollouts,
    tool_environments,
)
from kedge.environments.episode import check_turn_tokens
from kedge.environments.pool import Calls, close_all
from kedge.environments.turn_tokens import TurnTokens
from kedge.models.compatibility import vocabulary
from kedge.records.errors import ConfigError, DataError
from kedge.records.protocols import PromptSource, RolloutEngine
from kedge.records.types import Sampling
from kedge.rewards.build import as_list, load_module
from kedge.trainers.assembly.setup import Setup
from kedge.trainers.spec import TrainerInputs

_EMPTY = [{"role": "user", "content": ""}]
Make = Callable[[], Any] | Mapping[str, Callable[[], Any]]


def check_turns_end(sampling: Sampling, args: EnvironmentArguments) -> None:
    """Check that turns can end before the episode's tokens are spent, and can be long enough."""
    check_turn_tokens(sampling, args.max_turn_tokens)
    if not (sampling.stop_ids or sampling.stop_strings or args.max_turn_tokens):
        raise ConfigError(
            "environments need turns that end, but there is no stop token: set"
            " stop_token='eos', stop_token_ids, stop_strings or max_turn_tokens"
        )


def check_conversations(setup: Setup) -> None:
    """Check that the chat template can render the conversation of an episode again."""
    prompts, args = setup.prompts, setup.args
    tokens = TurnTokens(
        setup.tokenizer, chat_template_kwargs=read_mapping(args.chat_template_kwargs)
    )
    tokens.check_drops_reasoning()
    if prompts.report.truncated:
        raise ConfigError(
            "drop_reasoning renders prompts again, but overlong_prompts='truncate' has cut"
            f" {prompts.report.truncated} of them; raise max_prompt_length, or drop them"
        )
    first = prompts.batch(0).rows(slice(0, 1))
    template = template_options({name: values[0] for name, values in first.columns.items()})
    tools, ids = template.pop(TOOLS, None), first.ids[0][first.mask[0]].tolist()
    tokens.variant(template).conversation(first.columns["prompt"][0], ids, tools=tools)


def check_columns(setup: Setup, make: Make, prompts: Iterable[PromptSource]) -> None:
    """Check the columns that choose environments and show tools, in every row.

    Raises:
        DataError: naming the row.
    """
    given = setup.inputs.tools or setup.inputs.environment_factory
    for source in prompts:
        if not isinstance(source, DatasetPrompts):
            continue
        for row, tools in source.values(TOOLS) if given and TOOLS in source.columns else ():
            if tools:
                raise DataError(
                    f"column {TOOLS!r}, row {row}: the policy would read these tools, but can call"
                    " those of tools= and environment_factory= alone; remove or rename the column"
                )
        known = [*make] if isinstance(make, Mapping) else []
        for row, name in source.values("environment") if known else ():
            if name not in known:
                raise DataError(
                    f"column 'environment', row {row}: must name one of"
                    f" {', '.join(map(str, known))}, got {name!r}; fix the row"
                )


def play_in(
    make: Make,
    args: EnvironmentArguments,
    engine: RolloutEngine,
    tokenizer: Any,
    *,
    context: int | None = None,
    keep_last_observation: bool = False,
    **options: Any,
) -> EnvironmentRollouts:
    """Wrap ``engine`` to play in environments with the limits of ``args``."""
    limits = EpisodeLimits(
        max_turns=args.max_turns,
        max_turn_tokens=args.max_turn_tokens,
        max_observation_tokens=args.max_observation_tokens,
        max_seconds=args.max_episode_seconds,
        context=context,
        keeps_last=keep_last_observation,
        timeout=args.environment_timeout,
        max_concurrency=args.environment_concurrency,
        on_env_error=args.on_env_error,
        env_error_score=args.env_error_score,
    )
    reasoning = args.drop_reasoning
    return EnvironmentRollouts(engine, make, tokenizer, limits, drop_reasoning=reasoning, **options)


def environments_to_play(
    args: EnvironmentArguments, dataset: Any, sampling: Sampling
) -> tuple[Any, Callable[..., EnvironmentRollouts]]:
    """Rows with prompts for ``args.environment``, and ``play_in`` with the environments and limits.

    The dataset has prompts or columns for ``reset``; None: the environment gives the prompts.
    """
    check_turns_end(sampling, args)
    make = load_environment(args.environment, args)
    if dataset is None and isinstance(make, Mapping):
        raise ConfigError("several environments need prompts with a column 'environment'")
    rows = [{"prompt": _EMPTY}] if dataset is None else add_prompts(dataset)
    return rows, partial(play_in, make, args)


def find_environments(inputs: TrainerInputs) -> tuple[TrainerInputs, Make | None]:
    """Find and check the environments that the arguments or the config name.

    Returns the arguments with the reward, prompts and engine that environments imply, and a
    function that makes the environments; None: ``rollout_func`` samples.
    """
    args = inputs.args
    kinds = {
        "environment": inputs.environment,
        "environment (option)": args.environment,
        "rollout_func": inputs.rollout_func,
        "tools or environment_factory": inputs.tools or inputs.environment_factory,
        "rollout_engine": inputs.rollout_func and inputs.rollout_engine is not None,
    }
    both = [name for name, value in kinds.items() if value][:2]
    if len(both) > 1:
        raise ConfigError(f"{' and '.join(both)} both decide how episodes are sampled; pass one")
    if args.environment_kwargs is not None and not (args.environment or inputs.environment):
        raise ConfigError("environment_kwargs needs environment; set it, or leave the kwargs out")
    if inputs.rollout_func is not None:
        if args.max_lag:
            raise ConfigError(
                f"rollout_func samples with the weights that are being trained, so max_lag must be"
                f" 0, got {args.max_lag}"
            )
        engine = FunctionRollouts(
            inputs.rollout_func,
            lambda: inputs.trainer,
            pad_id=0,
            vocabulary=lambda: vocabulary(inputs.trainer.model),
        )
        return replace(inputs, rollout_engine=engine), None
    scored = True
    if inputs.tools or inputs.environment_factory:
        make: Make = tool_environments(
            inputs.tools or (),
            inputs.environment_factory,
            max_iterations=args.max_tool_calling_iterations,
        )
        # Make one of each kind, to check its tools.
        made = []
        for factory in make.values() if isinstance(make, Mapping) else [make]:
            thread = CallThread("environment")  # what is made there may have to be closed there
            made.append((thread.start(factory).result(), thread))
        scored = any(environment.gives_rewards for environment, _ in made)
        close_all(made, Calls(timeout=args.environment_timeout))
    else:
        make = load_environment(inputs.environment or args.environment, args)
    rewards, models = as_list(inputs.reward_funcs), as_list(inputs.reward_model)
    if not (scored or rewards or models):
        raise ConfigError(
            "no reward is configured: pass reward_funcs, or an environment_factory whose class has"
            " a method get_reward"
        )
    weights = args.reward_weights if inputs.reward_weights is None else inputs.reward_weights
    if weights is not None and len(weights) == len(rewards) + len(models):
        weights = [*weights, 1.0]  # the weight of the environments
    changed = replace(
        inputs,
        reward_funcs=[*rewards, EpisodeReward()],
        reward_weights=weights,
        train_dataset=_prompts(inputs),
        eval_dataset=_fill_prompts(inputs, inputs.eval_dataset),
    )
    return changed, make


def load_environment(environment: Any, args: EnvironmentArguments) -> Make:
    """A function that makes environments, from a class, function, name, or mapping of them."""
    kwargs = read_mapping(args.environment_kwargs)
    if isinstance(environment, Mapping):
        for key, each in environment.items():
            _check_factory(f"environment[{key!r}]", each)
        return {key: partial(each, **kwargs) for key, each in environment.items()}
    factory: Any = _load(environment) if isinstance(environment, str) else environment
    _check_factory("environment", factory)
    return partial(factory, **kwargs)


def _load(name: str) -> Any:
    if (plugin := plugins.load("kedge.environments", name)) is not None:
        return plugin
    where, colon, attribute = name.rpartition(":")
    try:
        found = load_module(where, "kedge_environments") if colon else None
    except Exception as error:  # the user's file may raise anything
        raise ConfigError(
            f"environment={name!r}: cannot import {where!r} ({type(error).__name__}: {error})"
        ) from error
    if not hasattr(found, attribute):
        missing = f"; {where!r} does not define {attribute!r}" if colon else ""
        raise ConfigError(
            f"environment={name!r} must be module:Class, file.py:Class or the name of an"
            f" installed environment{missing}"
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


def _prompts(inputs: TrainerInputs) -> Any:
    """The dataset, or a single row whose prompt comes from ``reset``."""
    if inputs.train_dataset is not None:
        return _fill_prompts(inputs, inputs.train_dataset)
    if isinstance(inputs.environment_factory or inputs.environment, Mapping):
        raise ConfigError(
            "several environments need a train_dataset with a column 'environment', which names"
            " that of each row"
        )
    if inputs.args.max_steps <= 0 and inputs.args.total_episodes is None:
        raise ConfigError("without a train_dataset, set max_steps or total_episodes")
    return [{"prompt": _EMPTY}]


def _fill_prompts(inputs: TrainerInputs, dataset: Any) -> Any:
    """Add an empty user message to rows that only have columns for ``reset``."""
    if dataset is None or isinstance(dataset, Mapping) or inputs.data_collator is not None:
        return dataset
    if inputs.tools and not inputs.environment_factory:
        return dataset  # tools come without prompts
    return add_prompts(dataset)


def add_prompts(dataset: Any) -> Any:
    """Add a column of empty user messages if ``dataset`` has no prompts."""
    table = read_table(dataset)
    if {*SOURCES} & {*table.names}:
        return dataset
    columns = table.take(range(len(table)), table.names)
    return {**columns, "prompt": [_EMPTY] * len(table)}
