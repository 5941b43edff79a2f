"""Declares options: default, help text, where they act and their range; the type is annotated.

``option`` declares a field; ``check_option`` checks a value against annotation and range.  Fields
inherited from ``transformers.TrainingArguments`` are described by the class's ``INHERITED`` table,
names that are not fields by its ``FOREIGN`` table.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from annotated_types import Interval
from pydantic import TypeAdapter, ValidationError

from kedge.config.values import MOST, checked_type, describe_problem, shown
from kedge.errors import ConfigError
from kedge.redaction import redact

_SECRET = ("hub_token", "push_to_hub_token")


@dataclass(frozen=True, slots=True)
class ActsIn:
    """An inherited field that acts.

    Args:
        acts_in: component that reads it.
        limits: bounds of the number.
        accepts: type of the values that Python code may give, if wider than the annotation.
        resume: whether a resumed run must have the same value.
    """

    acts_in: str
    limits: Interval | None = None
    accepts: Any = None
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of the option ``target``.

    Args:
        target: the option that gets the value.
        convert: converts the value; None: it is passed on.
        default: value at which the name counts as not set.
        limits: bounds of the number, if narrower than the target's.
    """

    target: str
    convert: Callable[[Any], Any] | None = None
    default: Any = None
    limits: Interval | None = None


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A name that is refused unless it has its default.

    Args:
        reason: why it is not supported.
        way_out: what to do instead.
        default: of a name that is not a field.
        also: values that are equivalent to the default.
    """

    reason: str
    way_out: str
    default: Any = None
    also: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A name that cannot change what is trained: accepted, with a line in the log.

    Args:
        reason: why it has no effect.
        default: of a name that is not a field.
        also: values without a line in the log.
    """

    reason: str
    default: Any = None
    also: tuple[Any, ...] = ()


Inherited = ActsIn | Unsupported | NoEffect
Foreign = Alias | Unsupported | NoEffect
UNKNOWN = Unsupported("this version of Kedge does not know this option", "leave it at its default")


class Option(Field[Any]):
    """A dataclass field that also holds what is known of the option besides its help.

    Not in ``metadata``, every entry of which ``HfArgumentParser`` hands to argparse.
    """

    __slots__ = ("accepts", "acts_in", "alias", "limits", "resume")

    def __init__(self, default: Any, metadata: Mapping[str, Any], **known: Any) -> None:
        plain: Any = field(default=default, metadata=metadata)
        for name in Field.__slots__:
            setattr(self, name, getattr(plain, name))
        for name in self.__slots__:
            setattr(self, name, known[name])


def option(
    default: Any,
    text: str = "",
    *,
    acts_in: str | None = None,
    alias: str | None = None,
    resume: bool | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    accepts: Any = None,
    alias_action: type[argparse.Action] | None = None,
) -> Any:
    """A dataclass field with all that is known about the option.

    A field that overrides another inherits what is not given here, apart from ``alias``.

    Args:
        default: value if the option is not given.
        text: one sentence of help, with the unit; empty if the class's docstring has it.
        acts_in: component that reads it.
        alias: another name, of another library or release.
        resume: whether a resumed run must have the same value.
        ge: lowest value of the number, or of each number of a list.
        gt: exclusive lower bound.
        le: highest value; infinity is allowed only if it is the bound.
        lt: exclusive upper bound.
        accepts: type of the values that Python code may give, if wider than the annotation, which
            argument parsers read.
        alias_action: stores the value in a ``HfArgumentParser``, given the flag that was used.
    """
    bounds = (ge, gt, le, lt)
    limits = None if bounds == (None,) * 4 else Interval(ge=ge, gt=gt, le=le, lt=lt)
    metadata: dict[str, Any] = {"help": text}
    if alias is not None:
        metadata["aliases"] = flags(alias)
        if alias_action is not None:
            metadata["action"] = alias_action
    return Option(
        default,
        metadata,
        accepts=accepts,
        acts_in=acts_in,
        alias=alias,
        limits=limits,
        resume=resume,
    )


def flags(name: str) -> list[str]:
    """The flag of an option, with underscores and with hyphens."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def default_of(field: Field[Any]) -> Any:
    """Default value of a dataclass field."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _declared(cls: type, name: str, key: str) -> Any:
    """What is declared of an option under ``key``, by the nearest class that says so."""
    declarations = [vars(base).get("__dataclass_fields__", {}).get(name) for base in cls.__mro__]
    declarations.append(getattr(cls, "INHERITED", {}).get(name))
    values = (getattr(declaration, key, None) for declaration in declarations)
    return next((value for value in values if value is not None), None)


def status(cls: type, name: str) -> str | Unsupported | NoEffect | None:
    """Where a field acts, or why it does not; None: a subclass added it for its own use."""
    where: str | None = _declared(cls, name, "acts_in")
    if where is not None:
        return where
    entry: Unsupported | NoEffect | None = getattr(cls, "INHERITED", {}).get(name)
    if entry is None:
        owners = [b for b in cls.__mro__ if name in vars(b).get("__dataclass_fields__", {})]
        added = owners and not owners[-1].__module__.startswith("transformers.")
        return None if added else UNKNOWN
    return entry


def aliases(cls: type) -> Mapping[str, Alias]:
    """Other names of a config's own options."""
    return {
        alias: Alias(f.name, default=False if default_of(f) is False else None)
        for f in fields(cls)
        if (alias := getattr(f, "alias", None)) is not None
    }


def resume_values(config: Any) -> dict[str, Any]:
    """The options that a resumed run must share with its checkpoint, by name."""
    names = (f.name for f in fields(config))
    return {n: getattr(config, n) for n in names if _declared(type(config), n, "resume")}


def check_fields(config: Any) -> None:
    """Check the type and range of every field that acts.

    Raises:
        ConfigError: naming the field, its value and the accepted values.
    """
    for f in fields(config):
        setattr(config, f.name, check_option(type(config), f.name, getattr(config, f.name)))


def check_option(cls: type, name: str, value: Any) -> Any:
    """Check and convert the value of a field; one that does not act takes any.

    Raises:
        ConfigError: naming the option, its value and the accepted values.
    """
    if hasattr(cls, "INHERITED") and not isinstance(status(cls, name), str):
        return value  # it must be the default, or has no effect
    default, hint, adapter = _type_of(cls, name)
    return value if value is default else _check(name, value, hint, adapter)


def check_alias(cls: type, name: str, alias: Alias, value: Any) -> Any:
    """Check and convert the value of another name.

    Raises:
        ConfigError: naming the alias, its value and the accepted values.
    """
    default, hint, adapter = _type_of(cls, alias.target)
    if alias.convert is not None or alias.limits is not None:
        hint = type(alias.default)
        adapter = TypeAdapter(checked_type(hint, alias.limits, empty=False))
    return value if value is default else _check(name, value, hint, adapter)


@functools.cache
def _type_of(cls: type, name: str) -> tuple[Any, Any, TypeAdapter[Any]]:
    """The default of a field, the type of its values, and what checks and converts them."""
    (f,) = (f for f in fields(cls) if f.name == name)
    hint = _declared(cls, name, "accepts")
    if hint is None:
        hint = _hints(cls)[name]
        if choices := f.metadata.get("choices"):  # which argument parsers are given
            named = Literal[tuple(choices)]  # type: ignore[valid-type]
            hint = named | None if NoneType in get_args(hint) else named
    default = default_of(f)
    checked = checked_type(hint, _declared(cls, name, "limits"), empty=default == "")
    return default, hint, TypeAdapter(checked)


_hints = functools.cache(get_type_hints)


def _check(name: str, value: Any, hint: Any, adapter: TypeAdapter[Any]) -> Any:
    """The value, with tuples as lists, paths as str and numbers as Python numbers."""
    try:
        taken = adapter.validate_python(value)
    except ValidationError as error:
        text = f"<{type(value).__name__}>" if name in _SECRET else shown(redact(value))
        problem = describe_problem(error, value, optional=NoneType in get_args(hint))
        raise ConfigError(f"{name}={text} must be {problem}") from None
    # torch takes larger integers for int64, and fails
    return value if type(value) is int and abs(value) <= MOST else taken
