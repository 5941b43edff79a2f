"""Serialization of data over pipes between the two processes of the sandbox.

A value arrives with its type, and a mutable object with its identity: both sides number the objects
of a call in the order in which they occur, so one that is changed or returned is the same there.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

MAX_FRAME = 64 << 20  # bytes


class Untestable(TypeError):
    """A value that cannot be carried from one process to the other."""


# Immutable types: arguments of their constructors.
FIXED: dict[str, Callable[[Any], list[Any]]] = {
    "builtins.bytes": lambda v: [v.decode("latin-1"), "latin-1"],
    "builtins.complex": lambda v: [v.real, v.imag],
    "builtins.tuple": lambda v: [list(v)],
    "builtins.frozenset": lambda v: [list(v)],
    "builtins.range": lambda v: [v.start, v.stop, v.step],
    "fractions.Fraction": lambda v: [v.numerator, v.denominator],
    "decimal.Decimal": lambda v: [str(v)],
    "datetime.date": lambda v: [v.year, v.month, v.day],
    "datetime.timedelta": lambda v: [v.days, v.seconds, v.microseconds],
    "datetime.datetime": lambda v: [*v.timetuple()[:6], v.microsecond],  # without a time zone
    "datetime.time": lambda v: [v.hour, v.minute, v.second, v.microsecond],
}
# Mutable types: arguments that make an empty one.
FILLED: dict[str, Callable[[Any], list[Any]]] = {
    "builtins.list": lambda v: [],
    "builtins.dict": lambda v: [],
    "builtins.set": lambda v: [],
    "builtins.bytearray": lambda v: [],
    "collections.deque": lambda v: [[], v.maxlen],
    "collections.Counter": lambda v: [],
    "collections.OrderedDict": lambda v: [],
    "collections.defaultdict": lambda v: [getattr(v.default_factory, "__name__", None)],
}
FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}
# What instances of subclasses are sent as: enumerations, named tuples, ...
BASES: tuple[Any, ...] = (
    int, float, str, bytes, complex, list, dict, tuple, set, frozenset, bytearray,
)  # fmt: skip


def make(name: str, arguments: list[Any]) -> Any:
    """An object of a type in the tables."""
    module, _, kind = name.rpartition(".")
    if kind == "defaultdict":
        arguments = [FACTORIES.get(arguments[0])]
    return getattr(importlib.import_module(module), kind)(*arguments)


class Wire:
    """Packs and unpacks the values of one call; ``objects`` are its mutable objects so far.

    Args:
        refer: the packed form of an object that is sent by reference, or None.
        resolve: the object for such a form.
    """

    def __init__(self, refer: Callable[[Any], Any], resolve: Callable[[Any], Any]) -> None:
        self._refer, self._resolve = refer, resolve
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def _add(self, value: Any) -> None:
        self._numbers[id(value)] = len(self.objects)
        self.objects.append(value)

    def pack(self, value: Any) -> Any:
        """A value as JSON: plain ones as they are, others as ``{kind: content}``."""
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:  # hexadecimal digits are not limited in number
            return value if abs(value) < 1 << 63 else {"x": hex(value)}
        if id(value) in self._numbers:
            return {"a": self._numbers[id(value)]}
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in FIXED and getattr(value, "tzinfo", None) is None:
            return {"n": [name, [self._item(argument) for argument in FIXED[name](value)]]}
        if name in FILLED:
            self._add(value)
            return {"m": [name, FILLED[name](value), self.contents(value)]}
        form = self._refer(value)
        if form is not None:
            return form
        if isinstance(value, Iterator):
            return {"i": [self.pack(item) for item in value]}
        for base in BASES:
            if isinstance(value, base):
                return self.pack(base(value))
        raise Untestable(f"a {kind.__name__} cannot leave its process")

    def _item(self, argument: Any) -> Any:
        """An argument of a constructor; its list has no identity."""
        return [self.pack(x) for x in argument] if type(argument) is list else self.pack(argument)

    def contents(self, value: Any) -> list[Any]:
        """The packed contents of a mutable object."""
        if isinstance(value, dict):
            return [[self.pack(key), self.pack(item)] for key, item in value.items()]
        return [self.pack(item) for item in value]

    def unpack(self, value: Any) -> Any:
        """The value of a packed form."""
        if not isinstance(value, dict):
            return value
        ((key, content),) = value.items()
        if key == "x":
            return int(content, 16)
        if key == "a":
            return self.objects[content]
        if key == "i":
            return iter([self.unpack(item) for item in content])
        if key == "n" and content[0] in FIXED:
            return make(content[0], [self._part(argument) for argument in content[1]])
        if key == "m" and content[0] in FILLED:
            made = make(content[0], content[1])
            self._add(made)
            self.fill(made, content[2])
            return made
        return self._resolve(value)

    def _part(self, argument: Any) -> Any:
        if isinstance(argument, list):
            return [self.unpack(item) for item in argument]
        return self.unpack(argument)

    def fill(self, value: Any, contents: list[Any]) -> None:
        """Replace the contents of a mutable object."""
        if isinstance(value, dict):
            pairs = [(self.unpack(key), self.unpack(item)) for key, item in contents]
            value.clear()
            dict.update(value, pairs)  # Counter.update would count them
            return
        items = [self.unpack(item) for item in contents]
        value.clear()
        value.update(items) if isinstance(value, set) else value.extend(items)


def encode_frame(value: Any) -> bytes:
    """One value as a frame: length and JSON."""
    body = json.dumps(value).encode()
    return struct.pack(">Q", len(body)) + body


def write_frame(fd: int, value: Any) -> None:
    """Send one value."""
    write_all(fd, encode_frame(value))


def write_all(fd: int, data: bytes) -> None:
    """Send all bytes, in as many writes as needed."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int) -> Any:
    """The next value, or None at EOF."""
    head = read_exactly(fd, 8)
    if head is None:
        return None
    (size,) = struct.unpack(">Q", head)
    body = read_exactly(fd, size) if size <= MAX_FRAME else None
    return None if body is None else json.loads(body)


def read_exactly(fd: int, size: int) -> bytes | None:
    """Exactly ``size`` bytes, or None if fewer are left."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
