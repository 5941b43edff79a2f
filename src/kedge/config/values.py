"""Checks of option values by type and range, with pydantic."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from annotated_types import Interval
from pydantic import AfterValidator, BeforeValidator, InstanceOf, Strict, ValidationError

FINITE = 1e30  # larger numbers soon overflow in float32
LARGEST = 2**31 - 1  # sizes, counts and token ids
TINIEST = 1e-300  # smaller numbers lose their digits
MOST = 2**53  # responses and iterations of a run; exact in float64
SECONDS = 1e9  # more than 30 years: longer waits overflow Python's timers
_MANY = 400  # characters of choices that an error message lists
_SHOWN = 100  # characters of a value in an error message
_WORDS = {  # of pydantic, and shorter
    "Input should be ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "valid ": "",
    "a integer": "an integer",
}


def shown(value: Any) -> str:
    """``repr(value)`` for an error message: one line, shortened; never raises."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever an unknown object's __repr__ raises
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _check_text(text: str) -> str:
    if not text:
        raise ValueError("a non-empty string")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("a non-empty string without NUL characters or lone surrogates")
    return text


def _check_json(text: str) -> str:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("a JSON object", f", but is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError("a JSON object")
    return text


def _check_json_file(text: str) -> str:
    if not text.startswith("{") and not os.path.isfile(os.path.expanduser(text)):
        raise ValueError("the name of a JSON file, or JSON; the file does not exist")
    return _check_json(text) if text.startswith("{") else text


def _choice_check(choices: Sequence[Any]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, str | bool):  # 0 would be False; enumerations print other values
            raise ValueError(f"one of {', '.join(map(repr, choices))}")
        return value

    return check


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _tuple_as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


Text: TypeAlias = Annotated[
    str, Strict(), BeforeValidator(_path_as_text), AfterValidator(_check_text)
]
JSONFile: TypeAlias = Annotated[Text, AfterValidator(_check_json_file)]  # or the JSON itself


def checked_type(hint: Any, limits: Interval | None, *, empty: bool) -> Any:
    """The type by which pydantic checks and converts the values of an option.

    Args:
        hint: the resolved annotation.
        limits: bounds of numbers, including those in lists; infinity is refused unless it is one.
        empty: whether the empty string is accepted.
    """

    def inner(part: Any) -> Any:
        return checked_type(part, limits, empty=empty)

    origin, args = get_origin(hint), get_args(hint)
    if list in (origin, hint):
        items: Any = list[inner(args[0])] if args else list[Any]  # type: ignore[misc]
        return Annotated[items, Strict(), BeforeValidator(_tuple_as_list)]
    if origin in (Union, UnionType):
        has_mapping = any(dict in (a, get_origin(a)) for a in args)
        has_choices = any(isinstance(a, type) and issubclass(a, Enum) for a in args)
        parts = [
            Annotated[str, Strict(), AfterValidator(_check_json)]
            if a is str and has_mapping
            else inner(a)
            for a in args
            if not (a is str and has_choices)  # the names of the choices
        ]
        return Union[tuple(parts)]  # noqa: UP007
    if origin is Literal:
        return Annotated[hint, BeforeValidator(_choice_check(args))]
    if hint is dict:
        return dict[str, Any]
    is_class = isinstance(hint, type) and origin is None and hint is not NoneType
    return _checked_class(hint, limits, empty=empty) if is_class else hint


def _checked_class(hint: Any, limits: Interval | None, *, empty: bool) -> Any:
    if hint in (int, float):
        number = BeforeValidator(_number_check(hint, limits))
        return Annotated[hint, number] if limits is None else Annotated[hint, limits, number]
    if hint is bool:
        return Annotated[bool, Strict()]
    if hint is str:
        return Annotated[str, Strict()] if empty else Text
    if issubclass(hint, Enum):
        return Annotated[hint, BeforeValidator(_choice_check([x.value for x in hint]))]
    anything: Any = InstanceOf
    return anything[hint]


def _number_check(kind: type, limits: Interval | None) -> Callable[[Any], Any]:
    bounds = (getattr(limits, "le", None), getattr(limits, "lt", None))
    infinite = math.inf in bounds
    bounded = bounds != (None, None)
    most = LARGEST if kind is int and not bounded else FINITE

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            kind_name = "an integer" if kind is int else "a number"
            raise ValueError(kind_name + (", without quotes" if isinstance(value, str) else ""))
        number: Any = value
        if 0 < abs(number) < TINIEST:
            raise ValueError("0 or a larger number; it is too small")
        in_range = abs(number) <= most or (infinite and number == math.inf)
        if not in_range:  # or not a number
            raise ValueError("a finite number" + ("; it is too large" if number > most else ""))
        return number if isinstance(number, int | float) else number.item()  # NumPy's

    return check


def describe_problem(error: ValidationError, value: Any, *, optional: bool) -> str:
    """What the value must be, in the words of pydantic's errors; ``optional``: or None."""
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
    text = text if len(text) <= _MANY else f"{text[:_MANY]}..."
    return f"{text}; the nearest is {near[0]!r}" if near else text
