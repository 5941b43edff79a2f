"""Builds configs from keyword arguments, in the names of Kedge or of other libraries.

Names are translated and values checked and converted before the dataclass is built, so a config is
not changed once it exists.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import Field, fields
from types import SimpleNamespace
from typing import Any

from kedge.config.declare import (
    Alias,
    Foreign,
    Unsupported,
    aliases,
    check_alias,
    check_option,
    default_of,
    status,
)
from kedge.config.values import shown
from kedge.errors import ConfigError, OptionError
from kedge.suggestions import hint

logger = logging.getLogger(__name__)


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


class ConfigType(type):
    """Type of the configs: checks and translates the keyword arguments before ``__init__``.

    A metaclass, because ``@dataclass`` gives each subclass a new ``__init__``.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Build a config.

        Raises:
            OptionError: an unknown name.
            ConfigError: a value or a combination that cannot work.
        """
        names = [*fields_of(cls)]
        options |= dict(zip(names, args, strict=False))
        known = foreign(cls)
        # The arguments of a subclass's own __init__ that are not options.
        own: Mapping[str, Any] = {}
        if any(name not in names and name not in known for name in options):
            own = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        extra = {n: v for n, v in options.items() if n in own and n not in (*names, *known)}
        options = {n: v for n, v in options.items() if n not in extra}
        translated = translate(cls, options)
        config = cls.__new__(cls)  # type: ignore[call-overload]
        config.__init__(**extra, **translated)
        # From here on, assignments are checked.
        config.given = frozenset(getattr(known.get(name), "target", name) for name in options)
        return config

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields; tools would show that of ``__call__``."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


@functools.cache
def fields_of(cls: type) -> Mapping[str, Field[Any]]:
    """The fields that are options, by name."""
    return {f.name: f for f in fields(cls) if f.init}


@functools.cache
def foreign(cls: type) -> Mapping[str, Foreign]:
    """The names that a config accepts in addition to its fields."""
    table: Mapping[str, Foreign] = getattr(cls, "FOREIGN", {})
    return {**table, **aliases(cls)} if table else {}


def translate(cls: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments under the names of the fields, checked and converted.

    Args:
        cls: the config class; its ``convert`` changes values whose meaning depends on others.
        options: names and values as the caller gave them.

    Raises:
        OptionError: an unknown name.
        ConfigError: an unsupported name, two names of one option, or a value of a wrong type.
    """
    defaults = {name: default_of(f) for name, f in fields_of(cls).items()}
    values: dict[str, Any] = {}
    for name in sorted(options, key=lambda name: name not in defaults):  # aliases last
        target, value = take(cls, name, options[name])
        if target is None or (target != name and equal(options[name], foreign(cls)[name].default)):
            continue
        present = values.get(target, defaults[target])
        if target != name and present not in (defaults[target], value):
            raise ConfigError(
                f"{name}={shown(value)} is another name of {target}, but"
                f" {target}={shown(present)} is set; set only {target}"
            )
        values[target] = value
    draft = SimpleNamespace(**(defaults | values))
    if hasattr(cls, "convert"):
        cls.convert(draft, options)
    return {n: v for n, v in vars(draft).items() if n in values or v is not defaults[n]}


def take(cls: type, name: str, value: Any) -> tuple[str | None, Any]:
    """The field that a name stands for and its checked value; None for a name without a field.

    Raises:
        OptionError: an unknown name.
        ConfigError: the name is not supported, or takes no such value.
    """
    entry: Any = foreign(cls).get(name)
    default = getattr(entry, "default", None)
    if entry is None:
        own = fields_of(cls)
        if name not in own:
            suggestion = hint(name, {*own, *foreign(cls)})
            raise OptionError(f"{cls.__name__} has no option {name!r}{suggestion}")
        where, default = status(cls, name), default_of(own[name])
        if where is None or isinstance(where, str):
            return name, check_option(cls, name, value)
        entry = where
    if isinstance(entry, Alias):
        if not equal(value, default):
            value = check_alias(cls, name, entry, value)
        return entry.target, value if entry.convert is None else entry.convert(value)
    if not equal(value, default) and not any(equal(value, x) for x in entry.also):
        if isinstance(entry, Unsupported):
            raise ConfigError(
                f"{name}={shown(value)} is not supported: {entry.reason}; {entry.way_out}"
            )
        logger.warning("%s=%s has no effect: %s", name, shown(value), entry.reason)
    return None if name in foreign(cls) else name, value


def refuse_unread(config: Any, readers: Collection[str], rule: str) -> None:
    """Refuse options of the trainer's built-in algorithm if a custom algorithm replaces it.

    Args:
        config: the config, and its ``UNSET``: the values of options that were not given.
        readers: how ``acts_in`` begins for the options that only the built-in reads.
        rule: name of the custom algorithm.

    Raises:
        ConfigError: such an option differs from its default.
    """
    for f in fields(config):
        where, value = status(type(config), f.name), getattr(config, f.name)
        default = default_of(f)
        reads = isinstance(where, str) and where.startswith(tuple(readers))
        if reads and value not in (default, config.UNSET.get(f.name, default)):
            raise ConfigError(
                f"{f.name}={value!r} is an option of the trainer's built-in algorithm and has no"
                f" effect with algorithm={rule}; leave it out, and pass options to {rule} itself"
                " (on the command line: --algorithm_kwargs)"
            )


def equal(value: Any, other: Any) -> bool:
    """Equality that tells True from 1 and never raises."""
    if value is other:
        return True
    if isinstance(value, bool) != isinstance(other, bool):
        return False
    try:
        return bool(value == other)
    except Exception:  # whatever an unknown object's __eq__ raises
        return False
