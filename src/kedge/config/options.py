"""Status of each field: it acts, it is another name of a field, it is refused, or it is ignored.

A field that would silently do nothing is refused if it is set to another value than its default,
with the reason and what to do instead.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from kedge.config.declare import default_of
from kedge.config.values import Range, shown
from kedge.errors import ConfigError

logger = logging.getLogger(__name__)


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Honored:
    """The field acts.

    Args:
        where: component that reads it.
        limits: bounds of the number, for a field of transformers.
        accepts: type of the values that Python code may give, if wider than the annotation.
    """

    where: str
    limits: Range | None = None
    accepts: Any = None


@dataclass(frozen=True, slots=True)
class Moved:
    """Another name: the value is passed on to the field ``to``."""

    to: str
    convert: Callable[[Any], Any] = _same


@dataclass(frozen=True, slots=True)
class Refused:
    """The field is not supported.

    Args:
        reason: why it is not supported.
        way_out: what to do instead.
        also: values that are equivalent to the default.
        typed: the constructor reads and resets it, so its type is checked first.
    """

    reason: str
    way_out: str
    also: tuple[Any, ...] = ()
    typed: bool = False


@dataclass(frozen=True, slots=True)
class Ignored:
    """The field has no effect and cannot change what is trained: accepted with a warning.

    ``also`` lists values without a warning.
    """

    reason: str
    also: tuple[Any, ...] = ()


_REMOTE: ContextVar[bool] = ContextVar("remote", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Context for options of a run on another machine: assume that every package is installed."""
    token = _REMOTE.set(True)
    try:
        yield
    finally:
        _REMOTE.reset(token)


def installed(package: str) -> bool:
    """Whether a package can be imported; does not import it."""
    return _REMOTE.get() or importlib.util.find_spec(package) is not None


Support = Honored | Moved | Refused | Ignored

UNKNOWN = Refused("this version of Kedge does not know this option", "leave it at its default")


def refuse_unread(config: Any, readers: Collection[str], rule: str) -> None:
    """Refuse options of the trainer's built-in algorithm if a custom algorithm replaces it.

    Args:
        config: a dataclass instance with its ``SUPPORT`` table, and ``SETTLED``: the values that
            unset fields got on construction.
        readers: prefixes of ``Honored.where`` of the options that only the built-in reads.
        rule: name of the custom algorithm.

    Raises:
        ConfigError: such an option differs from its default.
    """
    for f in fields(config):
        support, value = config.SUPPORT.get(f.name, UNKNOWN), getattr(config, f.name)
        default = default_of(f)
        reads = isinstance(support, Honored) and support.where.startswith(tuple(readers))
        if reads and value not in (default, config.SETTLED.get(f.name, default)):
            raise ConfigError(
                f"{f.name}={value!r} is an option of the trainer's built-in algorithm and has no"
                f" effect with algorithm={rule}; leave it out, and pass options to {rule} itself"
                " (on the command line: --algorithm_kwargs)"
            )


def apply_support(config: Any, table: Mapping[str, Support]) -> None:
    """Refuse unsupported fields, warn of ignored ones, and pass on values of other names.

    Args:
        config: a dataclass instance; other names are reset to their defaults.
        table: field name -> Support; a field that is missing from it is refused.

    Raises:
        ConfigError: a refused field is set, or two names of an option with different values.
    """
    defaults = {f.name: default_of(f) for f in fields(config)}
    for name, default in defaults.items():
        value, support = getattr(config, name), table.get(name, UNKNOWN)
        if _equal(value, default):
            continue
        if isinstance(support, Refused) and not any(_equal(value, x) for x in support.also):
            raise ConfigError(
                f"{name}={shown(value)} is not supported: {support.reason}; {support.way_out}"
            )
        if isinstance(support, Ignored) and not any(_equal(value, x) for x in support.also):
            _warn_once(config, name, f"{name}={shown(value)} has no effect: {support.reason}")
        if isinstance(support, Moved):
            _move(config, name, support, default, defaults[support.to])


def _warn_once(config: Any, name: str, text: str) -> None:
    warned = config.__dict__.setdefault("_warned_of", set())
    if name not in warned:
        warned.add(name)
        logger.warning("%s", text)


def _equal(value: Any, other: Any) -> bool:
    """Equality that tells True from 1 and never raises."""
    if value is other:
        return True
    if isinstance(value, bool) != isinstance(other, bool):
        return False
    try:
        return bool(value == other)
    except Exception:  # whatever an unknown object's __eq__ raises
        return False


def _move(config: Any, name: str, move: Moved, default: Any, target_default: Any) -> None:
    value, target = getattr(config, name), getattr(config, move.to)
    if target not in (target_default, move.convert(value)):
        raise ConfigError(
            f"{name}={shown(value)} is another name of {move.to}, which is set to {shown(target)}; "
            f"set only {move.to}"
        )
    setattr(config, move.to, move.convert(value))
    setattr(config, name, default)
