"""Declares options, and checks their values with pydantic.

An option is a dataclass field: its type holds the range (``typing.Annotated``), and its metadata
the help text, as ``HfArgumentParser`` reads them.  The class that declares a field first names the
part of a run that reads it (``SECTION``); the table ``STATUS`` of a config does so for the fields
of ``transformers.TrainingArguments``, and says which are refused or have no effect.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt
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

logger = logging.getLogger(__name__)
FINITE = 1e30  # larger numbers soon overflow float32
LARGEST = 2**31 - 1  # for sizes, counts and token ids
MOST = 2**53  # for responses and iterations of a run; exact in float64
SECONDS = 1e9  # more than 30 years: longer waits overflow Python's timers

Count: TypeAlias = Annotated[int, Ge(1)]
Natural: TypeAlias = Annotated[int, Ge(0)]
NonNegative: TypeAlias = Annotated[float, Ge(0)]
Positive: TypeAlias = Annotated[float, Gt(0)]
Probability: TypeAlias = Annotated[float, Interval(ge=0, le=1)]
Seconds: TypeAlias = Annotated[float, Interval(gt=0, le=SECONDS)]
Bound: TypeAlias = Annotated[float, Interval(gt=0, le=math.inf)]

_MAX_CHOICES = 400  # characters of choices that an error message lists
_MAX_VALUE = 100  # characters of a value in an error message
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
class Accepts:
    """In ``Annotated``: another type of values in Python; argument parsers do not see it."""

    kind: Any


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A name that cannot change what is trained: accepted, with a line in the log."""

    reason: str
    default: Any = None  # of a name that is not a field of transformers
    also: tuple[Any, ...] = ()  # values that are equivalent to the default

    def acts(self, value: Any, default: Any) -> bool:
        """Whether the value asks for something."""
        return not any(same(value, x) for x in (default, *self.also))


@dataclass(frozen=True, slots=True)
class Unsupported(NoEffect):
    """A name that is refused unless it has its default."""

    way_out: str = "leave it at its default"


_BOUNDS = (Ge, Gt, Le, Lt, Interval, Accepts)
UNKNOWN = Unsupported("this version of Kedge does not know this option")


def option(default: Any, text: str = "") -> Any:
    """Declare an option; ``text`` is one sentence of help, with the unit.

    Bounds in the type hold for each number of a list, and infinity is allowed only if it is the
    bound ``le``.
    """
    return field(default=default, metadata={"help": text})


def switch(default: bool | None, text: str) -> Any:
    """Declare an option that the flag alone sets to True."""
    return field(default=default, metadata={"help": text, "nargs": "?", "const": True})


def default_of(field: Field[Any]) -> Any:
    """Default value of a dataclass field."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def status(cls: type, name: str) -> Any:
    """The section of a config's field, or why it does not act.

    None: a subclass added it for its own use.
    """
    table: Mapping[str, Any] = getattr(cls, "STATUS", {})
    if name in table:
        return table[name]
    owner = _owners(cls, name)[-1]
    return vars(owner).get("SECTION", UNKNOWN if owner.__module__[:13] == "transformers." else None)


@functools.cache
def _owners(cls: type, name: str) -> list[type]:
    """The classes that declare a field, the nearest first."""
    return [base for base in cls.__mro__ if name in inspect.get_annotations(base)]


def check_fields(config: Any) -> None:
    """Check and convert the value of every option, and refuse those that are not supported."""
    cls = type(config)
    plain = not hasattr(cls, "STATUS")  # every field is an option
    for f in fields(cls):
        entry = "" if plain else status(cls, f.name)
        value, default = getattr(config, f.name), default_of(f)
        if isinstance(entry, str):
            setattr(config, f.name, check_option(cls, f.name, value))
        elif isinstance(entry, Unsupported) and entry.acts(value, default):
            raise ConfigError(
                f"{f.name}={format_value(value)} is not supported: {entry.reason}; {entry.way_out}"
            )


def log_without_effect(config: Any) -> None:
    """A line in the log for each option that is set, but has no effect."""
    for f in fields(config):
        entry, value = status(type(config), f.name), getattr(config, f.name)
        if isinstance(entry, NoEffect) and entry.acts(value, default_of(f)):
            logger.warning("%s=%s has no effect: %s", f.name, format_value(value), entry.reason)


def same(value: Any, other: Any) -> bool:
    """Equality that tells True from 1 and never raises."""
    if value is other:
        return True
    try:
        return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
    except Exception:  # an unknown object's __eq__ may raise anything
        return False


def check_option(cls: type, name: str, value: Any) -> Any:
    """Check and convert the value of a field."""
    default, optional, adapter = _type_of(cls, name)
    if value is default:
        return value
    try:  # convert tuples to lists, paths to str, and NumPy numbers to Python's
        converted = adapter.validate_python(value)
    except ValidationError as error:
        text = f"<{type(value).__name__}>" if name in _SECRET else format_value(redact(value))
        problem = describe_problem(error, value, optional=optional)
        raise ConfigError(f"{name}={text} must be {problem}") from None
    # torch fails on integers beyond int64
    return value if type(value) is int and abs(value) <= MOST else converted


@functools.cache
def _type_of(cls: type, name: str) -> tuple[Any, bool, TypeAdapter[Any]]:
    """A field's default, whether it may be None, and the adapter that checks its values.

    A subclass that changes the default of a field keeps its range.
    """
    (f,) = (f for f in fields(cls) if f.name == name)
    hints = [_hints(owner)[name] for owner in _owners(cls, name)]
    hint = next((hint for hint in hints if "Annotated" in repr(hint)), None)
    hint = hint or getattr(cls, "TYPES", {}).get(name, hints[0])
    if choices := f.metadata.get("choices"):  # argument parsers receive the choices
        named = Literal[tuple(choices)]  # type: ignore[valid-type]
        hint = named | None if NoneType in get_args(hint) else named
    default = default_of(f)
    kinds = get_args(hint)
    optional = bool({NoneType, Accepts(None)} & {*kinds, *get_args(kinds[0] if kinds else None)})
    return default, optional, TypeAdapter(checked_type(hint, None, empty=default == ""))


_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


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
    if get_origin(hint) is Annotated and isinstance(get_args(hint)[1], _BOUNDS):
        hint, *extras = get_args(hint)
        for extra in extras:
            hint = hint | extra.kind if isinstance(extra, Accepts) else hint
            limits = limits if isinstance(extra, Accepts) else extra
        return checked_type(hint, limits, empty=empty)

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
