"""Declares options and checks their values with pydantic.

``option`` declares a field: default, help text, where it acts and its range; the type is annotated.
``check_option`` checks a value against annotation and range.  Fields inherited from
``transformers.TrainingArguments`` are described by the class's ``INHERITED`` table, names that are
not fields by its ``FOREIGN`` table.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval
from pydantic import (
    AfterValidator,
    BeforeValidator,
    InstanceOf,
    Strict,
    TypeAdapter,
    ValidationError,
)

from kedge.records.errors import ConfigError
from kedge.redaction import redact

FINITE = 1e30  # larger numbers soon overflow float32
LARGEST = 2**31 - 1  # for sizes, counts and token ids
MOST = 2**53  # for responses and iterations of a run; exact in float64
SECONDS = 1e9  # more than 30 years: longer waits overflow Python's timers
_MAX_CHOICES = 400  # characters of choices that an error message lists
_MAX_VALUE = 100  # characters of a value in an error message
_LEAVE = "leave it at its default"
_SECRET = ("hub_token", "push_to_hub_token")
_WORDS = {  # replacements for pydantic's messages
    "Input should be ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "valid ": "",
    "a integer": "an integer",
}


@dataclass(frozen=True, slots=True)
class ActsIn:
    """Where an option acts and what it accepts; None: inherit from the parent class."""

    acts_in: str | None  # component that reads it
    limits: Interval | None = None
    accepts: Any = None  # type of the values in Python code, if wider than the annotation
    resume: bool | None = None  # whether a resumed run must have the same value


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of the option ``target``."""

    target: str
    convert: Callable[[Any], Any] | None = None  # None: pass the value on unchanged
    default: Any = None  # value at which the name counts as not set
    limits: Interval | None = None  # if narrower than the target's


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A name that is refused unless it has its default."""

    reason: str
    way_out: str = _LEAVE
    default: Any = None  # of a name that is not a field
    also: tuple[Any, ...] = ()  # values that are equivalent to the default


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A name that cannot change what is trained: accepted, with a line in the log."""

    reason: str
    default: Any = None  # of a name that is not a field
    also: tuple[Any, ...] = ()  # values without a line in the log


Inherited = ActsIn | Unsupported | NoEffect
Foreign = Alias | Unsupported | NoEffect
UNKNOWN = Unsupported("this version of Kedge does not know this option")


def unsupported(reason: str, way_out: str = _LEAVE, /, **defaults: Any) -> dict[str, Foreign]:
    """Rows for unsupported names that are not fields, with the defaults they accept."""
    return {name: Unsupported(reason, way_out, default) for name, default in defaults.items()}


def no_effect(reason: str, **defaults: Any) -> dict[str, Foreign]:
    """Rows for names without effect that are not fields, with the defaults that log nothing."""
    return {name: NoEffect(reason, default) for name, default in defaults.items()}


class Option(Field[Any]):
    """A dataclass field that also holds where the option acts, and its alias.

    Not in ``metadata``, since ``HfArgumentParser`` passes all of it to argparse.
    """

    __slots__ = ("alias", "declared")

    def __init__(self, default: Any, metadata: Any, declared: ActsIn, alias: str | None) -> None:
        plain: Any = field(default=default, metadata=metadata)
        for name in Field.__slots__:
            setattr(self, name, getattr(plain, name))
        self.declared, self.alias = declared, alias


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
    """Declare an option: a dataclass field with help, range and where it acts.

    A field that overrides another inherits what is not given here, apart from ``alias``, a name of
    another library or release.  See ``ActsIn``; ``text`` is one sentence of help, with the unit.
    Bounds hold for each number of a list, and infinity is allowed only if it is the bound ``le``.
    ``alias_action`` stores the value in a ``HfArgumentParser``, given the flag that was used.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    limits = None if set(bounds.values()) == {None} else Interval(**bounds)
    metadata: dict[str, Any] = {"help": text}
    if alias is not None:
        metadata["aliases"] = flags(alias)
        if alias_action is not None:
            metadata["action"] = alias_action
    return Option(default, metadata, ActsIn(acts_in, limits, accepts, resume), alias)


def flags(name: str) -> list[str]:
    """The flag of an option, with underscores and with hyphens."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def default_of(field: Field[Any]) -> Any:
    """Default value of a dataclass field."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _declared(cls: type, name: str, key: str) -> Any:
    """The value of ``key`` in the declaration of an option, from the nearest class that has one."""
    options = [vars(base).get("__dataclass_fields__", {}).get(name) for base in cls.__mro__]
    declarations = [getattr(field, "declared", None) for field in options]
    declarations.append(getattr(cls, "INHERITED", {}).get(name))
    values = (getattr(declaration, key, None) for declaration in declarations)
    return next((value for value in values if value is not None), None)


def status(cls: type, name: str) -> str | Unsupported | NoEffect | None:
    """Where a field acts, or why it does not; None: a subclass added it for its own use."""
    where: str | None = _declared(cls, name, "acts_in")
    if where is not None:
        return where
    inherited: Mapping[str, Any] = getattr(cls, "INHERITED", {})
    owners = [b for b in cls.__mro__ if name in vars(b).get("__dataclass_fields__", {})]
    added = owners and not owners[-1].__module__.startswith("transformers.")
    return inherited.get(name, None if added else UNKNOWN)


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
    """Check the type and range of every field that acts."""
    for f in fields(config):
        setattr(config, f.name, check_option(type(config), f.name, getattr(config, f.name)))


def check_option(cls: type, name: str, value: Any, alias: Alias | None = None) -> Any:
    """Check and convert the value of a field or alias; fields that do not act accept any value."""
    target = name if alias is None else alias.target
    if hasattr(cls, "INHERITED") and not isinstance(status(cls, target), str):
        return value  # only the default, or a value without effect, is accepted
    default, hint, adapter = _type_of(cls, target)
    if alias is not None and (alias.convert is not None or alias.limits is not None):
        hint = type(alias.default)
        adapter = TypeAdapter(checked_type(hint, alias.limits, empty=False))
    if value is default:
        return value
    try:  # convert tuples to lists, paths to str, and NumPy numbers to Python's
        converted = adapter.validate_python(value)
    except ValidationError as error:
        text = f"<{type(value).__name__}>" if name in _SECRET else format_value(redact(value))
        problem = describe_problem(error, value, optional=NoneType in get_args(hint))
        raise ConfigError(f"{name}={text} must be {problem}") from None
    # torch fails on integers beyond int64
    return value if type(value) is int and abs(value) <= MOST else converted


@functools.cache
def _type_of(cls: type, name: str) -> tuple[Any, Any, TypeAdapter[Any]]:
    """A field's default, the type of its values, and the adapter that checks them."""
    (f,) = (f for f in fields(cls) if f.name == name)
    hint = _declared(cls, name, "accepts")
    if hint is None:
        hint = _hints(cls)[name]
        if choices := f.metadata.get("choices"):  # argument parsers receive the choices
            named = Literal[tuple(choices)]  # type: ignore[valid-type]
            hint = named | None if NoneType in get_args(hint) else named
    default = default_of(f)
    checked = checked_type(hint, _declared(cls, name, "limits"), empty=default == "")
    return default, hint, TypeAdapter(checked)


_hints = functools.cache(get_type_hints)


def format_value(value: Any) -> str:
    """``repr(value)`` for an error message: one line, shortened; never raises."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an unknown object's __repr__ may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."


def _check_text(text: str) -> str:
    if not text or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        unusual = " without NUL characters or lone surrogates" if text else ""
        raise ValueError(f"a non-empty string{unusual}")
    return text


def _check_json(text: str) -> str:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("a JSON object", f", but is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError("a JSON object")
    return text


def read_mapping(value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The checked value of an option that is a mapping or a JSON object."""
    return dict(json.loads(value) if isinstance(value, str) else value or {})


def _check_json_file(text: str) -> str:
    if text.startswith("{"):
        return _check_json(text)
    if not os.path.isfile(os.path.expanduser(text)):
        raise ValueError("the name of a JSON file, or JSON; the file does not exist")
    return text


def _choice_check(choices: Sequence[Any]) -> BeforeValidator:
    def check(value: Any) -> Any:
        if not isinstance(value, str | bool):  # 0 would be False, enumerations print other values
            raise ValueError(f"one of {', '.join(map(repr, choices))}")
        return value

    return BeforeValidator(check)


_PATH = BeforeValidator(lambda x: os.fspath(x) if isinstance(x, os.PathLike) else x)
_TUPLE = BeforeValidator(lambda x: list(x) if isinstance(x, tuple) else x)
Text: TypeAlias = Annotated[str, Strict(), _PATH, AfterValidator(_check_text)]
JSONFile: TypeAlias = Annotated[Text, AfterValidator(_check_json_file)]  # path, or the JSON itself


def checked_type(hint: Any, limits: Interval | None, *, empty: bool) -> Any:
    """The type by which pydantic checks and converts the values of an option.

    ``limits`` bound numbers in lists, too; ``empty`` accepts the empty string.
    """

    def inner(part: Any) -> Any:
        return checked_type(part, limits, empty=empty)

    origin, args = get_origin(hint), get_args(hint)
    if list in (origin, hint):
        items: Any = list[inner(args[0])] if args else list[Any]  # type: ignore[misc]
        return Annotated[items, Strict(), _TUPLE]
    if origin in (Union, UnionType):
        if any(dict in (part, get_origin(part)) for part in args):
            text = Annotated[str, Strict(), AfterValidator(_check_json)]
            args = tuple(text if part is str else part for part in args)
        if any(map(_is_enum, args)):  # strings must name a member
            args = tuple(part for part in args if part is not str)
        return Union[tuple(map(inner, args))]  # noqa: UP007
    if origin is Literal:
        return Annotated[hint, _choice_check(args)]
    is_class = isinstance(hint, type) and origin is None and hint is not NoneType
    return _checked_class(hint, limits, empty=empty) if is_class else hint


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _checked_class(hint: Any, limits: Interval | None, *, empty: bool) -> Any:
    if _is_enum(hint):
        return Annotated[hint, _choice_check([member.value for member in hint])]
    if hint in (int, float):
        number = _number_check(hint, limits)
        return Annotated[hint, number] if limits is None else Annotated[hint, limits, number]
    if hint is str:
        return Annotated[str, Strict()] if empty else Text
    if hint is bool:
        return Annotated[bool, Strict()]
    if hint is dict:
        return dict[str, Any]
    anything: Any = InstanceOf
    return anything[hint]


def _number_check(kind: type, limits: Interval | None) -> BeforeValidator:
    bounds = (getattr(limits, "le", None), getattr(limits, "lt", None))
    infinite = math.inf in bounds
    bounded = bounds != (None, None)
    most = LARGEST if kind is int and not bounded else FINITE

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            kind_name = "an integer" if kind is int else "a number"
            raise ValueError(kind_name + (", without quotes" if isinstance(value, str) else ""))
        number: Any = value
        in_range = abs(number) <= most or (infinite and number == math.inf)
        if not in_range:  # or NaN
            raise ValueError("a finite number" + ("; it is too large" if number > most else ""))
        return number if isinstance(number, int | float) else number.item()  # NumPy's, too

    return BeforeValidator(check)


def describe_problem(error: ValidationError, value: Any, *, optional: bool) -> str:
    """Describe what the value must be, from pydantic's errors; ``optional`` adds None."""
    texts: dict[str, None] = {}
    detail = ""
    for entry in error.errors(include_url=False, include_input=False):
        text, context = entry["msg"], entry.get("ctx", {})
        for theirs, ours in _WORDS.items():
            text = text.replace(theirs, ours)
        if entry["type"] == "bool_type":
            text = "True or False" + (", without quotes" if isinstance(value, str) else "")
        elif "expected" in context:
            text = _describe_choices(value, str(context["expected"]))
        elif isinstance(context.get("error"), ValueError):
            text, *details = context["error"].args
            detail += "".join(details)
        item = next((part for part in entry["loc"] if isinstance(part, int)), None)
        texts[text if item is None else f"{text} (item {item})"] = None
    *first, last = [*texts, *(["None"] if optional else [])]
    return f"{', '.join(first)} or {last}{detail}" if first else f"{last}{detail}"


def _describe_choices(value: Any, choices: str) -> str:
    names = re.findall(r"'([^']*)'", choices)
    near = get_close_matches(value, names, n=1) if isinstance(value, str) else ()
    text = f"one of {choices}" if " or " in choices else choices
    text = text if len(text) <= _MAX_CHOICES else f"{text[:_MAX_CHOICES]}..."
    return f"{text}; the nearest is {near[0]!r}" if near else text
