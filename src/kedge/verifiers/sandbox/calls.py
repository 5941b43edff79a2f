"""Remote calls from the tests' process to that of the solution: both ends.

Only plain data is sent.  An instance of a solution's class is sent as a reference, and only if the
tests created it by calling that class: an arbitrary object could define ``__eq__`` as always true.
The tests' side numbers the references and rejects any number that it has not issued.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.verifiers.sandbox import wire
else:
    wire = sys.modules.get("sandbox_wire") or sys.modules["kedge.verifiers.sandbox.wire"]

CONSTANTS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
LONGEST = 10_000  # characters or entries of a constant that is sent to the tests


def described(error: BaseException) -> list[str]:
    """Class and message of an error."""
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)[:300]
    return [type(error).__name__, text]


def _short(value: Any) -> bool:
    return not hasattr(value, "__len__") or len(value) <= LONGEST


# --- the process of the solution ------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda thing, *args, **named: thing(*args, **named),
    "method": lambda thing, name, *args, **named: getattr(thing, name)(*args, **named),
    "get": getattr, "set": setattr, "len": len, "list": list, "str": str, "repr": repr,
    "true": bool, "item": operator.getitem, "put": operator.setitem,
    "drop": operator.delitem, "has": operator.contains,
}  # fmt: skip


class Kept:
    """The solution's names, and the instances of its classes that the tests created."""

    def __init__(self, module: types.ModuleType) -> None:
        self._names = module.__dict__
        self._objects: dict[int, Any] = {}

    def described(self) -> dict[str, Any]:
        """Description for the tests: names, classes, exceptions and constants."""
        functions, classes, errors, values = [], [], {}, {}
        for name, thing in list(self._names.items()):
            if isinstance(thing, type) and issubclass(thing, Exception):
                known = (base.__name__ for base in thing.__mro__ if base.__module__ == "builtins")
                errors[name] = next(known)
            elif callable(thing):
                functions.append(name)
                if isinstance(thing, type):
                    classes.append(name)
            elif type(thing) in CONSTANTS and not name.startswith("_") and _short(thing):
                with contextlib.suppress(TypeError, ValueError, RecursionError, MemoryError):
                    values[name] = wire.pack(thing)
        return {"functions": functions, "classes": classes, "errors": errors, "values": values}

    def serve(self, requests: int, answers: int) -> None:
        """Answer requests until EOF."""
        while (request := wire.read_frame(requests)) is not None:
            try:
                answer = wire.encoded(self._answer(request))
            except BaseException as error:
                answer = wire.encoded({"raised": described(error)})
            wire.write_all(answers, answer)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        arguments, named = self._unpacked(request["args"]), self._unpacked(request["kwargs"])
        where, what = request["on"], request["do"]
        thing = self._names[where] if isinstance(where, str) else self._objects[where]
        if what == "get" and callable(getattr(thing, *arguments)):
            return {"method": True}
        result = OPERATIONS[what](thing, *arguments, **named)
        if request["new"] is not None and isinstance(thing, type) and not self._plain(result):
            self._objects[request["new"]] = result
        return {"result": self._packed(result), "args": self._packed(list(arguments))}

    def _plain(self, value: Any) -> bool:
        try:
            wire.pack(value)
        except TypeError:
            return False
        return True

    def _packed(self, value: Any) -> Any:
        return wire.pack(value, self._reference)

    def _reference(self, value: Any) -> int | None:
        return next((i for i, kept in self._objects.items() if kept is value), None)

    def _unpacked(self, value: Any) -> Any:
        return wire.unpack(value, self._objects.__getitem__)


# --- the process of the tests ---------------------------------------------------------------------


class Died(BaseException):
    """The solution's process has died; ``except Exception`` in a test does not catch this."""


class Away:
    """Client for the solution in the tests' process; ``first`` is ``Kept.described()``."""

    def __init__(self, requests: int, answers: int, first: dict[str, Any]) -> None:
        self._requests, self._answers, self._first = requests, answers, first
        self._errors = {name: _make_error(name, base) for name, base in first["errors"].items()}
        self._classes: set[str] = set()
        self._created: set[int] = set()

    def names(self, wanted: list[str] | None, functions: set[str]) -> dict[str, Any]:
        """Proxies and constants for the names of the solution, or only those ``wanted``.

        ``functions`` are treated as functions even if the solution defines classes.
        """
        self._classes = set(self._first["classes"]) - functions
        values = self._first["values"]
        names: dict[str, Any] = {}
        for name in filter(str.isidentifier, wanted or [*self._first["functions"], *values]):
            value = values.get(name)
            names[name] = self._function(name) if value is None else wire.unpack(value)
        return names | self._errors

    def ask(self, where: str | int, what: str, *arguments: Any, **named: Any) -> Any:
        """Perform an operation on a name or object of the solution; raises what it raised."""
        packed = [wire.pack(x, reference_index) for x in (list(arguments), named)]
        new = len(self._created) if what == "call" and where in self._classes else None
        request = {"on": where, "do": what, "args": packed[0], "kwargs": packed[1], "new": new}
        wire.write_frame(self._requests, request)
        answer = wire.read_frame(self._answers)
        if answer is None:
            raise Died
        if "raised" in answer:
            raise self._error(*answer["raised"])
        if what == "get" and "method" in answer:
            return lambda *more, **options: self.ask(where, "method", *arguments, *more, **options)
        if new is not None and answer["result"] == {"o": new}:
            self._created.add(new)
        for argument, changed in zip(arguments, self._unpacked(answer["args"]), strict=True):
            update(argument, changed)
        return self._unpacked(answer["result"])

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return self.ask(name, "call", *arguments, **named)

        call.__name__ = name
        return call

    def _error(self, kind: str, text: str) -> Exception:
        error = self._errors.get(kind) or getattr(builtins, kind, None)
        if isinstance(error, type) and issubclass(error, Exception):
            return error(text)
        return RuntimeError(f"{kind}: {text}")

    def _unpacked(self, value: Any) -> Any:
        return wire.unpack(value, self._reference)

    def _reference(self, index: Any) -> Reference:
        if type(index) is not int or index not in self._created:
            raise TypeError("the solution returned an object that the tests did not create")
        return Reference(self, index)


def _make_error(name: str, base: str) -> type[Exception]:
    """An exception class with the solution's name and its built-in base."""
    kind = getattr(builtins, base, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = Exception
    return type(name, (kind,), {})


def _forward(operation: str) -> Callable[..., Any]:
    def forward(self: Reference, *arguments: Any, **named: Any) -> Any:
        return self._away.ask(self._index, operation, *arguments, **named)

    return forward


class Reference:
    """Proxy for an instance of a solution's class; operations run in the solution's process.

    It compares by identity; the solution's ``__eq__`` is ignored.
    """

    _away: Away
    _index: int

    def __init__(self, away: Away, index: int) -> None:
        self.__dict__.update(_away=away, _index=index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._index == self._index

    def __hash__(self) -> int:
        return hash(self._index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._away.ask(self._index, "list"))

    def __str__(self) -> str:
        return str(self._away.ask(self._index, "str"))

    def __repr__(self) -> str:
        return str(self._away.ask(self._index, "repr"))

    __getattr__, __setattr__ = _forward("get"), _forward("set")
    __call__, __len__, __bool__ = _forward("call"), _forward("len"), _forward("true")
    __contains__, __getitem__ = _forward("has"), _forward("item")
    __setitem__, __delitem__ = _forward("put"), _forward("drop")


def reference_index(value: Any) -> int | None:
    """The number of a reference, or None for other values."""
    index: int | None = value._index if type(value) is Reference else None
    return index


def update(argument: Any, new: Any) -> None:
    """Copy the contents of a mutable argument back after a call."""
    if isinstance(argument, list):
        argument[:] = new
    elif isinstance(argument, (dict, set)) and argument != new:
        argument.clear()
        argument.update(new)
