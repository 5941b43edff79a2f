"""Finds environments by name, and checks that prompts and the chat template suit them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge import plugins
from kedge.chat_template import TOOLS, template_options
from kedge.data import DatasetPrompts
from kedge.data.encode import SOURCES, read_table
from kedge.environments.turn_tokens import TurnTokens
from kedge.records.errors import ConfigError, DataError
from kedge.records.protocols import PromptSource

EMPTY_PROMPT = [{"role": "user", "content": ""}]  # of rows whose prompt comes from ``reset``
Make = Callable[[], Any] | Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """What makes the environments of a run: one kind, or several by the column ``environment``."""

    make: Make
    own_tools: bool = False  # made of functions or objects: the policy can call their tools alone

    def check_columns(self, prompts: Iterable[PromptSource]) -> None:
        """Check the columns that choose environments and show tools, in every row.

        Raises:
            DataError: naming the row.
        """
        for source in prompts:
            if not isinstance(source, DatasetPrompts):
                continue
            shows = self.own_tools and TOOLS in source.columns
            for row, tools in source.values(TOOLS) if shows else ():
                if tools:
                    raise DataError(
                        f"column {TOOLS!r}, row {row}: the policy would read these tools, but can"
                        " call those of tools= and environment_factory= alone; remove or rename"
                        " the column"
                    )
            known = [*self.make] if isinstance(self.make, Mapping) else []
            for row, name in source.values("environment") if known else ():
                if name not in known:
                    raise DataError(
                        f"column 'environment', row {row}: must name one of"
                        f" {', '.join(map(str, known))}, got {name!r}; fix the row"
                    )


def check_conversations(
    prompts: DatasetPrompts, tokenizer: Any, chat_template_kwargs: Mapping[str, Any]
) -> None:
    """Check that the chat template can render the conversation of an episode again."""
    tokens = TurnTokens(tokenizer, chat_template_kwargs=chat_template_kwargs)
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


def load_environment(environment: Any, kwargs: Mapping[str, Any]) -> Make:
    """A function that makes environments, from a class, function, name, or mapping of them."""
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
        module = plugins.load_module(where, "kedge_environments") if colon else None
    except Exception as error:  # the user's file may raise anything
        raise ConfigError(
            f"environment={name!r}: cannot import {where!r} ({type(error).__name__}: {error})"
        ) from error
    if not hasattr(module, attribute):
        missing = f"; {where!r} does not define {attribute!r}" if colon else ""
        raise ConfigError(
            f"environment={name!r} must be module:Class, file.py:Class or the name of an"
            f" installed environment{missing}"
        )
    return getattr(module, attribute)


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


def add_prompts(dataset: Any) -> Any:
    """Add a column of empty user messages if ``dataset`` has no prompts."""
    table = read_table(dataset)
    if {*SOURCES} & {*table.names}:
        return dataset
    columns = table.take(range(len(table)), table.names)
    return {**columns, "prompt": [EMPTY_PROMPT] * len(table)}
