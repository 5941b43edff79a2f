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
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from kedge.config.declare import (
    Alias,
    Foreign,
    NoEffect,
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
    """Type of the configs: translates the keyword arguments before the config is built."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Build a config.

        Raises:
            OptionError: an unknown name.
            ConfigError: a value or a combination that cannot work.
        """
        names = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
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
        config.given = frozenset(getattr(known.get(name), "target", name) for name in options)
        config.after_convert = {
            f.name: translated.get(f.name, default_of(f))
            for f in fields(cls)  # type: ignore[arg-type]
            if f.name in getattr(cls, "ON_CONSTRUCTION", ())
        }
        config.__init__(**extra, **translated)
        return config

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields; tools would show that of ``__call__``."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


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
    known, names = foreign(cls), {f.name for f in fields(cls) if f.init}
    unknown = [name for name in options if name not in names and name not in known]
    if unknown:
        suggestion = hint(unknown[0], {*names, *known})
        raise OptionError(f"{cls.__name__} has no option {unknown[0]!r}{suggestion}")
    defaults = {f.name: default_of(f) for f in fields(cls) if f.init}
    values = {n: check_option(cls, n, v) for n, v in options.items() if n in names}
    for name, value in options.items():
        if name not in names:
            _take_foreign(cls, values, defaults, name, value)
    draft = SimpleNamespace(**(defaults | values))
    if hasattr(cls, "convert"):
        cls.convert(draft, options)
    return {n: v for n, v in vars(draft).items() if n in values or v is not defaults[n]}


def _take_foreign(
    cls: type, values: dict[str, Any], defaults: Mapping[str, Any], name: str, value: Any
) -> None:
    entry = foreign(cls)[name]
    if equal(value, entry.default):
        return
    if not isinstance(entry, Alias):
        check_unsupported(name, value, entry)
        return
    value = check_alias(cls, name, entry, value)
    value = value if entry.convert is None else entry.convert(value)
    target = values.get(entry.target, defaults[entry.target])
    if target not in (defaults[entry.target], value):
        raise ConfigError(
            f"{name}={shown(value)} is another name of {entry.target}, but"
            f" {entry.target}={shown(target)} is set; set only {entry.target}"
        )
    values[entry.target] = value


def check_unsupported(name: str, value: Any, entry: Unsupported | NoEffect) -> None:
    """Refuse a name that is not supported, or log that it has no effect.

    Raises:
        ConfigError: the name is refused at this value.
    """
    if any(equal(value, x) for x in entry.also):
        return
    if isinstance(entry, NoEffect):
        logger.warning("%s=%s has no effect: %s", name, shown(value), entry.reason)
        return
    raise ConfigError(f"{name}={shown(value)} is not supported: {entry.reason}; {entry.way_out}")


def check_inherited(config: Any, *, log: bool) -> None:
    """Refuse fields that are not supported and away from their defaults.

    Args:
        config: the config.
        log: whether to log fields without effect.

    Raises:
        ConfigError: naming the field, the reason and what to do.
    """
    for f in fields(config):
        entry, value = status(type(config), f.name), getattr(config, f.name)
        if entry is None or isinstance(entry, str) or equal(value, default_of(f)):
            continue
        if log or isinstance(entry, Unsupported):
            check_unsupported(f.name, value, entry)


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
