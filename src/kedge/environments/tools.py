"""Python functions as tools, and classes whose methods are tools."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, get_type_hints

from kedge.background import in_thread
from kedge.environments.pool import MakeEnvironment
from kedge.environments.turn_tokens import valid_text
from kedge.records.errors import ConfigError, RolloutError, describe_error
from kedge.records.protocols import EnvironmentInfo, Observation
from kedge.records.types import Response, ToolCall

Tool = Callable[..., Any]


class ToolEnvironment:
    """An environment in which the policy calls functions until it answers without a call.

    The chat template shows the functions to the policy; results go back as tool messages.  A call
    that cannot be read, an unknown name, arguments that do not match the schema and an exception
    become messages to the policy; a ``RolloutError`` fails the episode.  An answer that is cut off
    by a token limit truncates it.  The reward is that of ``target.get_reward()`` at the end, or 0.

    Calls of one turn run at the same time, async ones on the event loop and others in threads;
    those of methods of ``target``, which share its state, one after another.

    Args:
        tools: functions with type hints and a Google-style docstring, also async ones, partials and
            objects with ``__call__``.
        target: an object whose public methods are tools as well, except ``reset(**columns)``, which
            begins an episode and may return text, and ``get_reward()``.  TRL's convention.
        max_iterations: turns whose calls are made; None: no limit.
    """

    def __init__(
        self, tools: Sequence[Tool] = (), target: Any = None, *, max_iterations: int | None = None
    ) -> None:
        self.target, self._max_iterations = target, max_iterations
        methods = [] if target is None else _methods(target)
        self._in_order = {method.__name__ for method in methods}
        self.tools = [tool_schema(function) for function in (*tools, *methods)]
        names = [schema["function"]["name"] for schema in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two tools are named {twice[0]!r}; give each another name")
        # Functions and their schemas by name.
        functions = zip((*tools, *methods), self.tools, strict=True)
        self._functions = dict(zip(names, functions, strict=True))
        self._iterations, self._grading = 0, False

    @property
    def info(self) -> EnvironmentInfo:
        """The functions as tools; what ``target.reset`` returns follows the prompt at once."""
        return EnvironmentInfo(
            tools=self.tools,
            reads_calls=True,
            separator="",  # as in TRL
            final_reward=True,
            grading=self._grading,
            target=self.target,
        )

    @property
    def gives_rewards(self) -> bool:
        """Whether the target has ``get_reward``."""
        return hasattr(self.target, "get_reward")

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        """Begin an episode: reset the target with the columns of the row."""
        self._iterations, self._grading = 0, False
        if self.target is None:
            return None, {}
        columns = dict(options)
        reset = self.target.reset
        if "seed" not in columns and "seed" in inspect.signature(reset).parameters:
            columns["seed"] = seed
        observation = reset(**columns)
        return _finish(observation, lambda observation: (observation, {}))

    def step(self, response: Response) -> Any:
        """Make the calls of the response; without any the episode ends.

        Where the limit of iterations ends it, the episode is truncated, as by any other limit.
        """
        calls = response.tool_calls
        limit = self._max_iterations
        if not calls or (limit is not None and self._iterations >= limit):
            whole = response.terminated and not calls
            ending = "answer" if whole else "token_limit"
            info = {"ending": "turn_limit" if calls else ending}
            self._grading = True
            final = self.final_reward()
            return _finish(final, lambda reward: (None, reward, whole, not whole, info))
        self._iterations += 1
        results = self._results(calls)
        if any(inspect.isawaitable(result) for result, _ in results):
            return self._gather(calls, results)
        return self._messages(calls, results)

    def final_reward(self) -> Any:
        """The reward of an episode that ends now."""
        get_reward = getattr(self.target, "get_reward", None)
        return 0.0 if get_reward is None else get_reward()

    def close(self) -> Any:
        """Close the target."""
        close = getattr(self.target, "close", None)
        return None if close is None or "close" in self._functions else close()

    def _results(self, calls: Sequence[ToolCall]) -> list[tuple[Any, bool]]:
        """Result of each call (possibly an awaitable), and whether it failed."""
        threads = {
            i: in_thread(partial(self._call, call), "tool")
            for i, call in enumerate(calls)
            if call.name not in self._in_order
        }
        in_order = {i: self._call(call) for i, call in enumerate(calls) if i not in threads}
        return [in_order[i] if i in in_order else threads[i].result() for i in range(len(calls))]

    def _call(self, call: ToolCall) -> tuple[Any, bool]:
        """Run a call; returns its result, and whether it failed."""
        if call.error:
            return f"Error: {call.error}", True
        if call.name not in self._functions:
            names = ", ".join(self._functions)
            return f"Error: there is no tool {call.name!r}; the tools are: {names}", True
        function, schema = self._functions[call.name]
        properties = schema["function"]["parameters"]["properties"]
        arguments = dict(call.arguments)
        for key, text in call.texts.items():  # the original text, where the schema wants a string
            if key in arguments and not _matches(arguments[key], properties.get(key, {})):
                arguments[key] = text
        problem = check_arguments(function, schema, arguments)
        if problem:
            return f"Error: {problem}", True
        try:
            result = function(**arguments)
            return result if inspect.isawaitable(result) else str(result), False
        except (Exception, SystemExit) as error:
            return _error_text(error), True

    async def _gather(
        self, calls: Sequence[ToolCall], results: list[tuple[Any, bool]]
    ) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        one_by_one = asyncio.Lock()  # calls run in order

        async def resolve(call: ToolCall, result: tuple[Any, bool]) -> tuple[Any, bool]:
            if not inspect.isawaitable(result[0]):
                return result
            async with one_by_one if call.name in self._in_order else nullcontext():
                try:
                    return str(await result[0]), False
                except (Exception, SystemExit) as error:
                    return _error_text(error), True

        pairs = zip(calls, results, strict=True)
        return self._messages(calls, await asyncio.gather(*(resolve(*pair) for pair in pairs)))

    def _messages(
        self, calls: Sequence[ToolCall], results: Sequence[tuple[Any, bool]]
    ) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        messages = [
            {
                "role": "tool",
                "name": valid_text(call.name or "unknown"),
                "content": valid_text(result),
                "tool_call_id": valid_text(call.id) or f"{self._iterations:04d}{i:05d}",
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
    """Convert arguments of TRL's trainers to ``make_environment`` of ``EnvironmentRollouts``.

    Args:
        tools: functions that every environment offers.
        environment_factory: makes a target, see ``ToolEnvironment``; or a mapping of names, chosen
            by the column ``environment``.
        max_iterations: turns whose calls are made; None: no limit.
    """

    def make(factory: Callable[[], Any] | None) -> ToolEnvironment:
        if not (factory is None or callable(factory)):
            raise ConfigError(
                "environment_factory must be a class or a function that makes an object, since"
                f" every episode needs one; got a {type(factory).__name__}"
            )
        target = None if factory is None else factory()
        return ToolEnvironment(tools, target, max_iterations=max_iterations)

    if isinstance(environment_factory, Mapping):
        return {name: partial(make, factory) for name, factory in environment_factory.items()}
    return partial(make, environment_factory)


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a function, from its type hints and docstring."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(_as_function(tool))
    except Exception as error:
        name = getattr(tool, "__name__", tool)
        hint = " A class with reset and step is passed as environment=." * (name == "step")
        raise ConfigError(
            f"the tool {name} needs type hints and a docstring with a section Args: {error}{hint}"
        ) from error
    return schema


def _as_function(tool: Tool) -> Tool:
    """The tool as a function; partials and objects get a name, type hints and documentation."""
    if inspect.isroutine(tool):
        return tool
    bound: Mapping[str, Any] = getattr(tool, "keywords", {})
    inner: Any = getattr(tool, "func", tool)
    routine = inner if inspect.isroutine(inner) else inner.__call__

    def call(**arguments: Any) -> Any:
        return tool(**arguments)

    signature = inspect.signature(tool)
    free = {name: p for name, p in signature.parameters.items() if name not in bound}
    hints = get_type_hints(routine)
    call.__name__ = getattr(inner, "__name__", type(inner).__name__)
    call.__doc__ = inspect.getdoc(routine) if routine.__doc__ else inspect.getdoc(inner)
    call.__signature__ = signature.replace(parameters=[*free.values()])  # type: ignore[attr-defined]
    call.__annotations__ = {name: hint for name, hint in hints.items() if name in free}
    return call


def check_arguments(tool: Tool, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Describe for the policy what is wrong with a call's arguments; empty if nothing is."""
    name, expected = schema["function"]["name"], schema["function"]["parameters"]
    known = expected["properties"]
    missing = [name for name in expected.get("required", ()) if name not in arguments]
    if missing:
        return f"{name} needs the argument {missing[0]!r}"
    for key, value in arguments.items():
        if key not in known:
            if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(tool).parameters.values()):
                continue
            return f"{name} has no argument {key!r}; it has: {', '.join(known) or 'none'}"
        if not _matches(value, known[key]):
            wanted = {k: v for k, v in known[key].items() if k != "description"}
            shown = json.dumps(value, ensure_ascii=False, default=str)
            return (
                f"the argument {key!r} of {name} must match {json.dumps(wanted)}, got {shown[:80]}"
            )
    return ""


_TYPES: Mapping[str, Any] = {
    "number": int | float, "string": str, "array": list | tuple, "object": Mapping,
    "boolean": bool, "null": type(None),
}  # fmt: skip


def _matches(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value matches a schema by ``tool_schema``."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_matches(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(value == x and type(value) is type(x) for x in schema["enum"])
    kinds = schema.get("type", [])
    if kinds and not any(
        _has_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ):
        return False
    if isinstance(value, Mapping):
        values = schema.get("additionalProperties", {})
        return all(_matches(x, values) for x in value.values())
    if isinstance(value, list | tuple):
        first = schema.get("prefixItems")
        if first is not None and len(first) != len(value):
            return False
        return all(map(_matches, value, first or [schema.get("items", {})] * len(value)))
    return True


def _has_type(value: Any, kind: str) -> bool:
    """Whether the value has this JSON schema type; unknown types match."""
    if kind == "integer":
        return _has_type(value, "number") and (isinstance(value, int) or value.is_integer())
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, object))


def _methods(target: Any) -> list[Tool]:
    names = [name for name, _ in inspect.getmembers(type(target), inspect.isfunction)]
    if "reset" not in names:
        raise ConfigError(
            f"{type(target).__name__} must have a method reset, since environment_factory made it"
        )
    hidden = ("reset", "get_reward")
    return [getattr(target, n) for n in names if n not in hidden and not n.startswith("_")]


def _error_text(error: BaseException) -> str:
    if isinstance(error, RolloutError):  # not the policy's mistake
        raise error
    return f"Error: {describe_error(error)}"


def _finish(value: Any, finish: Callable[[Any], Any]) -> Any:
    """Call ``finish(value)``; returns a coroutine if the value is awaitable."""

    async def wait() -> Any:
        return finish(await value)

    return wait() if inspect.isawaitable(value) else finish(value)
