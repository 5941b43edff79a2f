"""Python functions as tools, and classes whose methods are tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kedge.environments.pool import MakeEnvironment
from kedge.errors import ConfigError
from kedge.protocols import Observation
from kedge.types import Response, ToolCall

Tool = Callable[..., Any]


class ToolEnvironment:
    """An environment in which the policy calls functions until it answers without a call.

    The chat template shows the functions to the policy; results go back as tool messages.  A call
    that cannot be read, an unknown name, wrong arguments and an exception become messages to the
    policy.  The reward is that of ``target.get_reward()`` at the end, 0 without one.

    Args:
        tools: functions with type hints and a Google-style docstring; they may be async.
        target: an object whose public methods are tools as well, except ``reset(**columns)``, which
            begins an episode and may return text, and ``get_reward()``.  TRL's convention.
        max_iterations: turns whose calls are made; None: no limit.
    """

    separator = ""  # between the prompt and what ``target.reset`` returns, as in TRL

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        target: Any = None,
        *,
        max_iterations: int | None = None,
    ) -> None:
        self._target, self._max_iterations = target, max_iterations
        functions = [*tools, *([] if target is None else _methods(target))]
        self._functions = {function.__name__: function for function in functions}
        self.tools = [tool_schema(function) for function in functions]
        self._iterations = 0

    @property
    def gives_rewards(self) -> bool:
        """Whether the target has ``get_reward``."""
        return hasattr(self._target, "get_reward")

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        """Begin an episode: reset the target with the columns of the row."""
        self._iterations = 0
        if self._target is None:
            return None, {}
        columns = dict(options)
        reset = self._target.reset
        if "seed" not in columns and "seed" in inspect.signature(reset).parameters:
            columns["seed"] = seed
        observation = reset(**columns)
        if inspect.isawaitable(observation):
            return _awaited(observation)
        return observation, {}

    def step(self, response: Response) -> Any:
        """Make the calls of the response; without any the episode ends."""
        calls = response.tool_calls
        limit = self._max_iterations
        if not calls or (limit is not None and self._iterations >= limit):
            reward = self.final_reward()
            return (
                _ended(reward) if inspect.isawaitable(reward) else (None, reward, True, False, {})
            )
        self._iterations += 1
        results = [self._call(call) for call in calls]
        if any(inspect.isawaitable(result) for result, _ in results):
            return self._gather(calls, results)
        return self._messages(calls, results)

    def final_reward(self) -> Any:
        """The reward of an episode that ends now."""
        get_reward = getattr(self._target, "get_reward", None)
        return 0.0 if get_reward is None else get_reward()

    def close(self) -> None:
        """Close the target."""
        close = getattr(self._target, "close", None)
        if close is not None and "close" not in self._functions:
            close()

    def _call(self, call: ToolCall) -> tuple[Any, bool]:
        """The result of a call, and whether it failed."""
        if call.error:
            return f"Error: {call.error}", True
        function = self._functions.get(call.name)
        if function is None:
            names = ", ".join(self._functions)
            return f"Error: there is no tool {call.name!r}; the tools are: {names}", True
        try:
            return function(**call.arguments), False
        except Exception as error:
            return _error_text(error), True

    async def _gather(
        self, calls: Sequence[ToolCall], results: list[tuple[Any, bool]]
    ) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        for i, (result, _) in enumerate(results):
            if inspect.isawaitable(result):
                try:
                    results[i] = await result, False
                except Exception as error:
                    results[i] = _error_text(error), True
        return self._messages(calls, results)

    def _messages(
        self, calls: Sequence[ToolCall], results: Sequence[tuple[Any, bool]]
    ) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        messages = [
            {
                "role": "tool",
                "name": call.name or "unknown",
                "content": str(result),
                "tool_call_id": f"{self._iterations:04d}{i:05d}",
            }
            for i, (call, (result, _)) in enumerate(zip(calls, results, strict=True))
        ]
        metrics = {
            "tool_calls": len(calls),
            "tool_errors": sum(failed for _, failed in results),
            "invalid_calls": sum(bool(call.error) for call in calls),
        }
        return messages, 0.0, False, False, {"metrics": metrics}


def tool_environments(
    tools: Sequence[Tool] = (),
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    *,
    max_iterations: int | None = None,
) -> MakeEnvironment | dict[str, MakeEnvironment]:
    """What ``EnvironmentRollouts`` takes, from the arguments of TRL's trainers.

    Args:
        tools: functions that every environment offers.
        environment_factory: makes a target, see ``ToolEnvironment``; or a mapping of names, chosen
            by the column ``environment``.
        max_iterations: turns whose calls are made; None: no limit.

    Raises:
        ConfigError: a function has no valid schema.
    """

    def make(factory: Callable[[], Any] | None) -> ToolEnvironment:
        target = None if factory is None else factory()
        return ToolEnvironment(tools, target, max_iterations=max_iterations)

    for tool in tools:
        tool_schema(tool)
    if isinstance(environment_factory, Mapping):
        return {name: partial(make, factory) for name, factory in environment_factory.items()}
    return partial(make, environment_factory)


def tool_schema(function: Tool) -> dict[str, Any]:
    """The JSON schema of a function, from its signature and docstring.

    Raises:
        ConfigError: a type hint or the description of an argument is missing.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"the tool {getattr(function, '__name__', function)} needs type hints and a docstring"
            f" with a section Args: {error}"
        ) from error
    return schema


def _methods(target: Any) -> list[Tool]:
    names = [name for name, _ in inspect.getmembers(type(target), inspect.isfunction)]
    if "reset" not in names:
        raise ConfigError(
            f"{type(target).__name__} must have a method reset, since environment_factory made it"
        )
    hidden = ("reset", "get_reward")
    return [getattr(target, n) for n in names if n not in hidden and not n.startswith("_")]


def _error_text(error: Exception) -> str:
    return f"Error: {type(error).__name__}: {error}"


async def _awaited(observation: Any) -> tuple[Any, dict[str, Any]]:
    return await observation, {}


async def _ended(reward: Any) -> tuple[None, float, bool, bool, dict[str, Any]]:
    return None, await reward, True, False, {}
