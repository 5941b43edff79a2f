"""Calls a reward function with the arguments it asks for."""

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
    """A short name: of the function, of what a partial wraps, or of the object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` gives a coroutine and does no work yet."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


class Signature:
    """Which keyword arguments a function takes."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        try:
            known = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"reward function {name} has no signature that Python can read; wrap it in"
                " def reward(completions, **columns): ..."
            ) from error
        self._name = name
        self._all = any(p.kind is p.VAR_KEYWORD for p in known)
        self._named = {p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._required = {p.name for p in known if p.name in self._named and p.default is p.empty}
        only = [p.name for p in known if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if only:
            raise ConfigError(
                f"reward function {name} takes {', '.join(only)} by position only; rewards are"
                " called with keyword arguments (prompts, completions, ...)"
            )

    @property
    def columns(self) -> frozenset[str] | None:
        """Dataset columns the function may read, None if any."""
        return None if self._all else frozenset(self._named - {*PER_ROW, *FIXED})

    def check(self, columns: Collection[str]) -> None:
        """Refuse a dataset that lacks a column the function requires.

        Raises:
            ConfigError: naming the column and those that there are.
        """
        missing = sorted(self._required - {*PER_ROW, *FIXED} - ({*columns} - {"prompt"}))
        if not missing:
            return
        here = ", ".join(sorted(columns)) or "none"
        plural = f"{missing[0]}s"
        way = f"give {missing[0]} a column of that name, or a default in the function"
        way = f"take {plural}, a list, instead" if plural in PER_ROW else way
        raise ConfigError(
            f"reward function {self._name} needs {', '.join(missing)}, and the dataset has no such"
            f" column (its columns: {here}). Besides them a function can take"
            f" {', '.join([*PER_ROW, *FIXED])}; {way}"
        )

    def choose(self, offered: Collection[str]) -> list[str]:
        """The names among ``offered`` to pass.

        Raises:
            RewardError: the function requires a name that is not offered.
        """
        missing = self._required - set(offered)
        if missing:
            raise RewardError(
                f"reward function {self._name} asks for {', '.join(sorted(missing))}, which is"
                " neither a dataset column nor one of Kedge's arguments; there are"
                f" {', '.join(sorted(offered))}"
            )
        return [name for name in offered if self._all or name in self._named]


def arguments(
    texts: Texts, signature: Signature, log: RewardLog, trainer_state: object
) -> dict[str, Any]:
    """The keyword arguments of one call over all rows of a rollout."""
    columns = texts.rollout.prompts.columns
    fixed = dict(zip(FIXED, (trainer_state, log.metric, log.extra), strict=True))
    reserved = {"prompt", *PER_ROW, *FIXED}  # a column cannot hide one of Kedge's arguments
    extra = {name: list(values) for name, values in columns.items() if name not in reserved}
    names = signature.choose([*PER_ROW, *fixed, *extra])
    own = fixed | extra
    return {name: own[name] if name in own else list(getattr(texts, name)) for name in names}


def one_row(kwargs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The arguments of the same call for one row alone; what it logs is not kept."""
    alone = {k: v[row : row + 1] if isinstance(v, list) else v for k, v in kwargs.items()}
    silent = RewardLog()
    for name, method in (("log_metric", silent.metric), ("log_extra", silent.extra)):
        if name in alone:
            alone[name] = method
    return alone


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0  # process that started the loop: threads do not survive a fork


def submit(awaitable: Awaitable[Any]) -> Future[Any]:
    """Run ``awaitable`` on the background loop."""

    async def wait() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), _running())


def _running() -> asyncio.AbstractEventLoop:
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="kedge-rewards", daemon=True).start()
        return _loop
