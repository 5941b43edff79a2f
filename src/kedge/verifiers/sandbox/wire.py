"""Serialization of plain data over pipes between the two processes of the sandbox."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

MAX_FRAME = 64 << 20  # bytes

SIMPLE: dict[type, Callable[[Any], Any]] = {
    bool: bool,
    int: int,
    float: float,
    str: str,
    bytes: lambda value: {"b": bytes(value).hex()},
    bytearray: lambda value: {"b": bytes(value).hex()},
    complex: lambda value: {"c": [value.real, value.imag]},
}


def pack(value: Any, reference: Callable[[Any], int | None] = lambda _: None) -> Any:
    """Encode a value of built-in types as JSON that preserves the types.

    ``reference`` returns the number of an object that is sent by reference, or None.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    number = reference(value)
    if number is not None:
        return {"o": number}
    for kind, packed in SIMPLE.items():
        if isinstance(value, kind):
            return packed(value)
    if isinstance(value, dict):
        pairs = value.items()
        return {"d": [[pack(key, reference), pack(item, reference)] for key, item in pairs]}
    for key, kinds in (("l", list), ("t", tuple), ("s", set), ("z", frozenset), ("r", range)):
        if isinstance(value, kinds):
            return {key: [pack(item, reference) for item in value]}
    if isinstance(value, Iterator):
        return {"i": [pack(item, reference) for item in value]}
    raise TypeError(f"a {type(value).__name__} cannot leave the sandbox")


def unpack(value: Any, referred: Callable[[int], Any] | None = None) -> Any:
    """Decode the result of ``pack``; ``referred`` returns the object for a reference number."""
    if not isinstance(value, dict):
        return value
    ((key, items),) = value.items()
    if key == "o" and referred is not None:
        return referred(items)
    if key == "b":
        return bytes.fromhex(items)
    if key == "c":
        return complex(*items)
    if key == "d":
        return {unpack(name, referred): unpack(item, referred) for name, item in items}
    values = [unpack(item, referred) for item in items]
    builders: dict[str, Callable[[list[Any]], Any]] = {
        "l": list, "t": tuple, "s": set, "z": frozenset, "r": list, "i": iter,
    }  # fmt: skip
    return builders[key](values)


def encoded(value: Any) -> bytes:
    """One value as a frame: length and JSON."""
    body = json.dumps(value).encode()
    return struct.pack(">Q", len(body)) + body


def write_frame(fd: int, value: Any) -> None:
    """Send one value."""
    write_all(fd, encoded(value))


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
