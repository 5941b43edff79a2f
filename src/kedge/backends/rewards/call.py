"""Calls a reward function with the keyword arguments that it accepts."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from kedge.backends.rewards.log import RewardLog
from kedge.backends.rewards.texts import Texts
from kedge.errors import ConfigError, RewardError

PER_ROW = ("prompts", "completions", "prompt_ids", "completion_ids")
FIXED = ("trainer_state", "log_metric", "log_extra")


def function_name(function: Callable[..., Any]) -> str:
    """Short name of a function, of the function in a partial, or of a callable's class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` returns a coroutine without doing any work."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


class Signature:
    """The keyword arguments that a function accepts."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"reward function {name} has no signature that Python can inspect; wrap it in"
                " def reward(completions, **columns): ..."
            ) from error
        self._name = name
        self._all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._named = {
            p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        self._required = {
            p.name for p in parameters if p.name in self._named and p.default is p.empty
        }
        positional_only = [
            p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
        ]
        if positional_only:
            raise ConfigError(
                f"reward function {name} takes {', '.join(positional_only)} by position only, but"
                " is called with keyword arguments (prompts, completions, ...); remove the '/'"
            )

    @property
    def columns(self) -> frozenset[str] | None:
        """Dataset columns that the function may read; None: any."""
        return None if self._all else frozenset(self._named - {*PER_ROW, *FIXED})

    def check(self, columns: Collection[str]) -> None:
        """Reject a dataset that lacks a column the function requires.

        Raises:
            ConfigError: naming the missing column and the existing ones.
        """
        missing = sorted(self._required - {*PER_ROW, *FIXED} - ({*columns} - {"prompt"}))
        if not missing:
            return
        available = ", ".join(sorted(columns)) or "none"
        plural = f"{missing[0]}s"
        fix = f"add a dataset column {missing[0]!r}, or give the argument a default"
        fix = f"use {plural}, a list, instead" if plural in PER_ROW else fix
        raise ConfigError(
            f"reward function {self._name} needs {', '.join(missing)}, and the dataset has no such"
            f" column (its columns: {available}). In addition to columns, a function can take"
            f" {', '.join([*PER_ROW, *FIXED])}; {fix}"
        )

    def choose(self, offered: Collection[str]) -> list[str]:
        """The names in ``offered`` that the function accepts.

        Raises:
            RewardError: the function requires a name that is not in ``offered``.
        """
        missing = self._required - set(offered)
        if missing:
            raise RewardError(
                f"reward function {self._name} requires {', '.join(sorted(missing))}, which is"
                " neither a dataset column nor one of Kedge's arguments; available:"
                f" {', '.join(sorted(offered))}"
            )
        return [name for name in offered if self._all or name in self._named]


def arguments(
    texts: Texts, signature: Signature, log: RewardLog, trainer_state: object
) -> dict[str, Any]:
    """The keyword arguments of one call over all rows of a rollout."""
    columns = texts.rollout.prompts.columns
    fixed = dict(zip(FIXED, (trainer_state, log.metric, log.extra), strict=True))
    reserved = {"prompt", *PER_ROW, *FIXED}  # a column cannot shadow one of Kedge's arguments
    extra = {name: list(values) for name, values in columns.items() if name not in reserved}
    names = signature.choose([*PER_ROW, *fixed, *extra])
    values = fixed | extra
    return {n: values[n] if n in values else list(getattr(texts, n)) for n in names}


def one_row(kwargs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The same arguments for a single row; what that call logs is discarded."""
    single = {k: v[row : row + 1] if isinstance(v, list) else v for k, v in kwargs.items()}
    silent = RewardLog()
    for name, method in (("log_metric", silent.metric), ("log_extra", silent.extra)):
        if name in single:
            single[name] = method
    return single


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0  # process that started the loop: threads do not survive a fork


def submit(awaitable: Awaitable[Any]) -> Future[Any]:
    """Run ``awaitable`` on the background event loop."""

    async def wait() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), _background_loop())


def _background_loop() -> asyncio.AbstractEventLoop:
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="kedge-rewards", daemon=True).start()
        return _loop
