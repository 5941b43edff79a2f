"""What becomes of a field: it acts, it acts under another name, or it is refused.

A field is a promise.  One that would silently do nothing is refused when it is set away from its
default, with the reason and the way out.
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
    """The field does what it says.

    Args:
        where: the part that reads it.
        limits: bounds of a number, for a field of transformers.
        accepts: type of the values that Python code may give, where the annotation says less.
    """

    where: str
    limits: Range | None = None
    accepts: Any = None


@dataclass(frozen=True, slots=True)
class Moved:
    """An older name: its value is handed to the field ``to``."""

    to: str
    convert: Callable[[Any], Any] = _same


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing would read the field.

    Args:
        reason: why nothing reads it.
        way_out: what to do instead.
        also: values that mean the default.
        typed: it is read and reset while the config is made, so its type is checked first.
    """

    reason: str
    way_out: str
    also: tuple[Any, ...] = ()
    typed: bool = False


@dataclass(frozen=True, slots=True)
class Ignored:
    """Nothing reads the field, and nothing that is trained depends on it: one warning.

    ``also`` lists values that need no warning.
    """

    reason: str
    also: tuple[Any, ...] = ()


_ELSEWHERE: ContextVar[bool] = ContextVar("elsewhere", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Inside, options are of a run on another machine: any package may be installed there."""
    token = _ELSEWHERE.set(True)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return _ELSEWHERE.get() or importlib.util.find_spec(package) is not None


Support = Honored | Moved | Refused | Ignored

UNKNOWN = Refused("this version of Kedge does not know what it asks for", "leave it at its default")


def refuse_unread(config: Any, readers: Collection[str], rule: str) -> None:
    """Refuse options of a trainer's own algorithm beside another rule, which has its own.

    Args:
        config: a dataclass instance with its ``SUPPORT`` table, and ``SETTLED``: the values that
            unset fields got when it was made.
        readers: beginnings of ``Honored.where`` that mean: the trainer's own rule reads it.
        rule: name of the rule that is used instead.

    Raises:
        ConfigError: such an option is away from its default.
    """
    for f in fields(config):
        support, value = config.SUPPORT.get(f.name, UNKNOWN), getattr(config, f.name)
        usual = default_of(f)
        reads = isinstance(support, Honored) and support.where.startswith(tuple(readers))
        if reads and value not in (usual, config.SETTLED.get(f.name, usual)):
            raise ConfigError(
                f"{f.name}={value!r} is an option of this trainer's own algorithm, and"
                f" algorithm={rule} has options of its own; give it what it knows where it is made"
                f" (on the command line: --algorithm_kwargs), and leave {f.name} out"
            )


def apply_support(config: Any, table: Mapping[str, Support]) -> None:
    """Refuse what would do nothing and hand over the values of older names.

    Args:
        config: a dataclass instance; older names are reset to their defaults.
        table: field name -> Support; a field that is missing from it is refused when changed.

    Raises:
        ConfigError: a refused field is away from its default, or both names of a value are set.
    """
    defaults = {f.name: default_of(f) for f in fields(config)}
    for name, default in defaults.items():
        value, support = getattr(config, name), table.get(name, UNKNOWN)
        if _equal(value, default):
            continue
        if isinstance(support, Refused) and not any(_equal(value, each) for each in support.also):
            raise ConfigError(
                f"{name}={shown(value)} is not supported: {support.reason}; {support.way_out}"
            )
        if isinstance(support, Ignored) and not any(_equal(value, x) for x in support.also):
            _warn_once(config, name, f"{name}={shown(value)} has no effect: {support.reason}")
        if isinstance(support, Moved):
            _hand_over(config, name, support, default, defaults[support.to])


def _warn_once(config: Any, name: str, text: str) -> None:
    warned = config.__dict__.setdefault("_warned_of", set())
    if name not in warned:
        warned.add(name)
        logger.warning("%s", text)


def _equal(value: Any, other: Any) -> bool:
    """Equality in which True is not 1, and which no odd value can make raise."""
    if value is other:
        return True
    if isinstance(value, bool) != isinstance(other, bool):
        return False
    try:
        return bool(value == other)
    except Exception:  # whatever an unknown object's __eq__ raises
        return False


def _hand_over(config: Any, name: str, move: Moved, default: Any, target_default: Any) -> None:
    value, target = getattr(config, name), getattr(config, move.to)
    if target not in (target_default, move.convert(value)):
        raise ConfigError(
            f"{name}={shown(value)} is another name of {move.to}, which is set to {shown(target)}; "
            f"set {move.to} alone"
        )
    setattr(config, move.to, move.convert(value))
    setattr(config, name, default)
