"""Episodes of scripted experts, as conversations for ``kedge sft``; ``kedge expert`` writes them.

An environment has an expert if it has a method ``expert(messages)``, which reads the conversation
and returns the next turn: text, or an assistant message with ``tool_calls``.  Episodes with
``noise`` also need its method ``random_action(rng)``, which returns an arbitrary turn.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from kedge.background import on_event_loop
from kedge.environments.episode import describe, read_number, read_step
from kedge.environments.turn_tokens import as_messages
from kedge.records.errors import ConfigError, KedgeError, RolloutError, describe_error
from kedge.records.protocols import EnvironmentInfo, NewContext, read_info
from kedge.records.types import Response, ToolCall

Row = dict[str, Any]
Message = dict[str, Any]


def expert_episodes(
    make_environment: Callable[[], Any],
    seeds: Sequence[int],
    *,
    noise: float = 0.0,
    max_turns: int = 16,
) -> Iterator[Row]:
    """One conversation per seed, each a row with ``messages`` and ``reward``.

    Rows of an environment with ``tools`` have its schemas, for the chat template.

    Args:
        make_environment: makes an environment with an expert.
        seeds: of the episodes.
        noise: probability that a turn of the expert is replaced by an arbitrary action.
        max_turns: longer episodes are cut off after this many turns.

    Raises:
        ConfigError: the environment has no expert, or no ``random_action`` for ``noise``.
        RolloutError: a method failed, or returned something that environments may not return.
    """
    if not 0 <= noise <= 1:
        raise ConfigError(f"noise must be from 0 to 1, got {noise}")
    environment = make_environment()
    needs = {"expert": "expert(messages) that returns the next response"}
    if noise:
        needs["random_action"] = (
            f"random_action(rng) that returns an arbitrary response, for noise={noise:g}; or set"
            " noise=0"
        )
    for name, use in needs.items():
        if not callable(getattr(environment, name, None)):
            raise ConfigError(
                f"{type(environment).__name__} has no {name}; add a static method {use}"
            )
    try:
        for seed in seeds:
            yield _play(environment, seed, noise, max_turns)
    finally:
        if hasattr(environment, "close"):
            _call(environment.close)


def _play(environment: Any, seed: int, noise: float, max_turns: int) -> Row:
    """Play one episode."""
    rng = random.Random(f"noise {seed}")
    result = _call(environment.reset, seed=seed, options={})
    if not isinstance(result, tuple) or len(result) != 2:
        raise RolloutError(f"reset must return (observation, info), got {describe(result)}")
    messages, total, goes_on = _read(result[0], "reset"), 0.0, True
    for _ in range(max_turns):
        careless = rng.random() < noise
        if careless:
            turn = _call(environment.random_action, rng)
        else:
            turn = _call(environment.expert, messages)
        message, response = _read_turn(turn, "random_action" if careless else "expert")
        step = read_step(_call(environment.step, response))
        observation, reward, terminated, truncated, _ = step
        total += reward
        messages.append(message)
        goes_on = not (terminated or truncated)
        if not goes_on:
            break
        messages += _read(observation, "step")
    info = read_info(environment, EnvironmentInfo)
    if goes_on and info.final_reward:
        total += read_number(_call(environment.final_reward), "a reward")
    while messages[-1]["role"] != "assistant":
        messages.pop()  # drop an observation that has no response
    row = {"messages": messages, "reward": total}
    return row | {"tools": info.tools} if info.tools else row


def _call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of an environment, which may be async; its errors have one line."""
    try:
        result = method(*args, **kwargs)
        if inspect.isawaitable(result):
            return on_event_loop(result, "environments").result()
    except KedgeError:
        raise
    except Exception as error:
        name = getattr(method, "__qualname__", type(method).__name__)
        raise RolloutError(f"{name} failed with {describe_error(error)}") from error
    return result


def _read(observation: Any, method: str) -> list[Message]:
    """The messages of an observation."""
    if not isinstance(observation, NewContext):
        messages = as_messages(observation)
        if messages or observation is None or not len(observation):
            return messages
    raise RolloutError(
        f"{method} must return text or messages for a conversation with an expert, got"
        f" {describe(observation)}"
    )


def _read_turn(turn: Any, method: str) -> tuple[Message, Response]:
    """The message of a turn, and what the environment reads of it."""
    message = {"content": turn} if isinstance(turn, str) else turn
    if not isinstance(message, Mapping) or message.get("role", "assistant") != "assistant":
        raise RolloutError(
            f"{method} must return text, or an assistant message with content and tool_calls, got"
            f" {describe(turn)}"
        )
    text, calls = message.get("content") or "", message.get("tool_calls") or []
    parsed = [_read_call(call, method) for call in calls]
    row = {"role": "assistant", **message, "content": text}
    return row, Response(text, parse=(lambda _: parsed) if parsed else None)


def _read_call(call: Any, method: str) -> ToolCall:
    """A call of an assistant message, ``{"type": "function", "function": {...}}`` or its inside."""
    inside = call.get("function", call) if isinstance(call, Mapping) else None
    name = inside.get("name") if isinstance(inside, Mapping) else None
    arguments = inside.get("arguments", {}) if isinstance(inside, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise RolloutError(
            f"a call in the tool_calls of {method} must have a name and arguments, got"
            f" {describe(call)}"
        )
    return ToolCall(name=name, arguments=arguments, id=str(call.get("id", "")))


if __name__ == "__main__":
    sys.exit(resolve_name("kedge.cli.main:main")(["expert", *sys.argv[1:]]))
