"""Checks of option values, built from type annotations."""

from __future__ import annotations

import base64
import json
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

FINITE = 1e30  # larger numbers soon overflow in float32
LARGEST = 2**31 - 1  # sizes, counts and token ids
MOST = 2**53  # responses and iterations of a run; exact in float64
SECONDS = 1e9  # more than 30 years: longer waits overflow Python's timers
_LARGE = 1e9  # bounds from here on are only mentioned if they are exceeded
_MANY = 12  # choices that an error message lists
_SHOWN = 100  # characters of a value in an error message
# A str may also be a file name, or DeepSpeed's base64 form.
_FILES = ("accelerator_config", "fsdp_config", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a number, or of each number of a list.

    Infinity is refused unless it is a bound itself: ``le=math.inf``.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def holds(self, value: float) -> bool:
        """Whether ``value`` is within the bounds."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        low = "" if self.ge is None else f"of at least {_number(self.ge)}"
        low = low if self.gt is None else f"above {_number(self.gt)}"
        high = "" if self.le is None or self.le >= _LARGE else f"at most {_number(self.le)}"
        high = high if self.lt is None else f"below {_number(self.lt)}"
        return " and ".join(bound for bound in (low, high) if bound)


def _number(x: float) -> str:
    return str(x) if isinstance(x, int) else f"{x:g}"


def shown(value: Any) -> str:
    """``repr(value)`` for an error message: one line, shortened; never raises."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever an unknown object's __repr__ raises
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class Mismatch(Exception):
    """A value is not of the expected kind; the message, if any, says why."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One type that a field accepts: its description, and the check that returns the value."""

    text: str
    take: Callable[[Any], Any]


def kinds_of(name: str, hint: Any, limits: Range, *, empty: bool = False) -> list[Kind]:
    """The kinds of values that an annotation accepts.

    Args:
        name: of the field; a few accept the name of a JSON file.
        hint: the resolved annotation.
        limits: bounds of numbers, including those in lists.
        empty: whether the empty string is accepted.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [_choices(args)]
    if list in (origin, hint):
        return [_list(kinds_of(name, args[0], limits) if args else [])]
    if dict in (origin, hint):
        return [Kind("a mapping of names to values", _mapping)]
    if args:
        return _union(name, args, limits, empty=empty)
    return [_plain(hint, limits, empty=empty)]


def _plain(hint: Any, limits: Range, *, empty: bool) -> Kind:
    if hint is type(None):
        return Kind("None", _none)
    if hint is bool:
        return Kind("True or False", _bool)
    if hint in (int, float):
        return _numbers(hint, limits)
    if hint is str:
        return Kind("a string" if empty else "a non-empty string", _text(empty))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choices(tuple(member.value for member in hint), hint)
    return _instance(hint if isinstance(hint, type) else object)


def _union(name: str, args: tuple[Any, ...], limits: Range, *, empty: bool) -> list[Kind]:
    has_choices = any(isinstance(a, type) and issubclass(a, Enum) for a in args)
    has_mapping = any(dict in (a, get_origin(a)) for a in args)
    kinds: list[Kind] = []
    for arg in args:
        if arg is str and has_choices:
            continue  # the names of the choices
        if arg is str and has_mapping:
            kinds.append(_json(name))
        else:
            kinds += kinds_of(name, arg, limits, empty=empty)
    return kinds


def take_first(kinds: Iterable[Kind], value: Any) -> Any:
    """The value as returned by the first kind that accepts it.

    Raises:
        Mismatch: no kind accepts it; the message, if any, says why.
    """
    first_reason = ""
    for kind in kinds:
        accepted, reason = _attempt(kind, value)
        if reason is None:
            return accepted
        first_reason = first_reason or reason
    raise Mismatch(first_reason)


def _attempt(kind: Kind, value: Any) -> tuple[Any, str | None]:
    try:
        return kind.take(value), None
    except Mismatch as error:
        return None, str(error)


def _none(value: Any) -> None:
    if value is not None:
        raise Mismatch


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise Mismatch(", without quotes" if isinstance(value, str) else "")


def _instance(cls: type) -> Kind:
    def take(value: Any) -> Any:
        if not isinstance(value, cls):
            raise Mismatch
        return value

    return Kind(f"of type {cls.__name__}", take)


def _choices(values: tuple[Any, ...], enum: type[Enum] | None = None) -> Kind:
    def take(value: Any) -> Any:
        if enum is not None and isinstance(value, enum):
            return value
        if not any(type(value) is type(choice) and value == choice for choice in values):
            names = [choice for choice in values if isinstance(choice, str)]
            near = get_close_matches(value, names, n=1) if isinstance(value, str) else ()
            raise Mismatch(f". Did you mean {near[0]!r}?" if near else "")
        return value

    listed = ", ".join(map(repr, values[:_MANY]))
    if len(values) == 1:
        return Kind(listed, take)
    more = f" and {len(values) - _MANY} more" if len(values) > _MANY else ""
    return Kind(f"one of {listed}{more}", take)


def _numbers(cls: type, limits: Range) -> Kind:
    whole, infinite = cls is int, math.inf in (limits.le, limits.lt)
    bounded = limits.le is not None or limits.lt is not None
    most = FINITE if infinite or not whole else math.inf if bounded else LARGEST

    def take(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise Mismatch(", without quotes" if isinstance(value, str) else "")
        number: Any = value
        if not (infinite and number == math.inf) and not -most <= number <= most:
            raise Mismatch("; it is too large" if number > most else "")
        if limits.le is not None and _LARGE <= limits.le < number:
            raise Mismatch("; it is too large")
        if not limits.holds(number) or (whole and (abs(number) == math.inf or number % 1)):
            raise Mismatch
        if type(number) is (int if whole else float):
            return number
        if type(number) is int and abs(number) <= MOST:
            return number  # torch takes larger integers for int64, and fails
        return cls(number)

    name = "an integer" if whole else "a number" if bounded else "a finite number"
    return Kind(f"{name} {limits}".strip(), take)


def _text(empty: bool) -> Callable[[Any], str]:
    def take(value: Any) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not (value or empty):
            raise Mismatch
        _check_text(value)
        return value

    return take


def _check_text(value: Any) -> None:
    """Refuse strings, also inside containers, that cannot be written to a file or tokenized."""
    if isinstance(value, str):
        if "\0" in value:
            raise Mismatch(", without NUL characters")
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise Mismatch(" that can be encoded as UTF-8, without lone surrogates")
    elif isinstance(value, Mapping):
        _check_text([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            _check_text(item)


def _list(inner: list[Kind]) -> Kind:
    def take(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise Mismatch
        items = [take_first(inner, item) for item in value] if inner else list(value)
        same = isinstance(value, list) and all(a is b for a, b in zip(value, items, strict=True))
        return value if same else items  # type: ignore[return-value]

    texts = " or ".join(kind.text for kind in inner)
    return Kind(f"a list (each {texts})" if inner else "a list", take)


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Mismatch
    _check_text(value)
    return value


def _json(name: str) -> Kind:
    def take(value: Any) -> str:
        text = _text(empty=False)(value)
        if name in _FILES and not text.startswith("{"):
            _object(_contents(name, text))
        else:
            _object(text)
        return text

    return Kind("the name of a JSON file" if name in _FILES else "a JSON object", take)


def _contents(name: str, file: str) -> str:
    try:
        if Path(file).expanduser().is_file():
            return Path(file).expanduser().read_text(encoding="utf-8")
        if name == "deepspeed":
            return base64.urlsafe_b64decode(file).decode("utf-8")
    except (OSError, ValueError) as error:
        raise Mismatch(f": {error}") from error
    raise Mismatch("; the file does not exist")


def _object(text: str) -> None:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Mismatch(f": {error}") from error
    if not isinstance(parsed, dict):
        raise Mismatch
    _check_text(parsed)
