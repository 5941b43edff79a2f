"""Calls from the tests' process to the solution's, both ends.

What crosses is plain data.  An object of a class of the solution crosses as a reference, and only
if the tests made it by calling that class: a result that may be any object could equal everything.
The tests' side numbers the references and knows which it has made; any other number is refused.
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
LONGEST = 10_000  # letters or entries of a constant that the tests are told


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
    "call": lambda thing, *given, **named: thing(*given, **named),
    "method": lambda thing, name, *given, **named: getattr(thing, name)(*given, **named),
    "get": getattr, "set": setattr, "len": len, "list": list, "str": str, "repr": repr,
    "true": bool, "item": operator.getitem, "put": operator.setitem,
    "drop": operator.delitem, "has": operator.contains,
}  # fmt: skip


class Kept:
    """The solution's names, and the objects that the tests have made of its classes.

    Args:
        module: the solution.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self._names = module.__dict__
        self._objects: dict[int, Any] = {}

    def described(self) -> dict[str, Any]:
        """What the tests are told of the solution: names, classes, errors and constants."""
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
        """Answer requests until there are no more."""
        while (request := wire.read_frame(requests)) is not None:
            try:
                answer = wire.encoded(self._answer(request))
            except BaseException as error:
                answer = wire.encoded({"raised": described(error)})
            wire.write_all(answers, answer)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        given, named = self._unpacked(request["args"]), self._unpacked(request["kwargs"])
        where, what = request["on"], request["do"]
        thing = self._names[where] if isinstance(where, str) else self._objects[where]
        if what == "get" and callable(getattr(thing, *given)):
            return {"method": True}
        result = OPERATIONS[what](thing, *given, **named)
        if request["new"] is not None and isinstance(thing, type) and not self._plain(result):
            self._objects[request["new"]] = result
        return {"result": self._packed(result), "args": self._packed(list(given))}

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
    """The solution's process is gone; no test can catch this."""


class Away:
    """The solution, as the tests see it.

    Args:
        requests: where calls are written.
        answers: where what became of them is read.
        first: what the solution says of itself, see ``Kept.described``.
    """

    def __init__(self, requests: int, answers: int, first: dict[str, Any]) -> None:
        self._requests, self._answers, self._first = requests, answers, first
        self._errors = {name: _own_error(name, base) for name, base in first["errors"].items()}
        self._classes: set[str] = set()
        self._made: set[int] = set()

    def names(self, wanted: list[str] | None, functions: set[str]) -> dict[str, Any]:
        """What the names of the solution stand for.

        Args:
            wanted: the names that tests see, beside errors; None: all.
            functions: names that are functions, whatever the solution makes of them.
        """
        self._classes = set(self._first["classes"]) - functions
        values = self._first["values"]
        found: dict[str, Any] = {}
        for name in filter(str.isidentifier, wanted or [*self._first["functions"], *values]):
            value = values.get(name)
            found[name] = self._function(name) if value is None else wire.unpack(value)
        return found | self._errors

    def ask(self, where: str | int, what: str, *given: Any, **named: Any) -> Any:
        """Do something with a name or an object of the solution.

        Raises:
            Died: there is no answer.
            Exception: what the solution raised.
        """
        packed = [wire.pack(x, reference_index) for x in (list(given), named)]
        new = len(self._made) if what == "call" and where in self._classes else None
        request = {"on": where, "do": what, "args": packed[0], "kwargs": packed[1], "new": new}
        wire.write_frame(self._requests, request)
        answer = wire.read_frame(self._answers)
        if answer is None:
            raise Died
        if "raised" in answer:
            raise self._error(*answer["raised"])
        if what == "get" and "method" in answer:
            return lambda *more, **options: self.ask(where, "method", *given, *more, **options)
        if new is not None and answer["result"] == {"o": new}:
            self._made.add(new)
        for own, changed in zip(given, self._unpacked(answer["args"]), strict=True):
            update(own, changed)
        return self._unpacked(answer["result"])

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            return self.ask(name, "call", *given, **named)

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
        if type(index) is not int or index not in self._made:
            raise TypeError("the solution returned an object that the tests have not made")
        return Reference(self, index)


def _own_error(name: str, base: str) -> type[Exception]:
    """An exception of the solution: its name, and the built-in one that it is made from."""
    kind = getattr(builtins, base, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = Exception
    return type(name, (kind,), {})


class Reference:
    """An object of a class of the solution: what is done to it is done there.

    It equals itself alone, whatever the solution says.
    """

    def __init__(self, away: Away, index: int) -> None:
        self.__dict__.update(_away=away, _index=index)

    def __getattr__(self, name: str) -> Any:
        return self._away.ask(self._index, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._away.ask(self._index, "set", name, value)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call it."""
        return self._away.ask(self._index, "call", *given, **named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._index == self._index

    def __hash__(self) -> int:
        return hash(self._index)

    def __len__(self) -> Any:
        return self._away.ask(self._index, "len")

    def __bool__(self) -> Any:
        return self._away.ask(self._index, "true")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._away.ask(self._index, "list"))

    def __contains__(self, value: Any) -> Any:
        return self._away.ask(self._index, "has", value)

    def __getitem__(self, key: Any) -> Any:
        return self._away.ask(self._index, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._away.ask(self._index, "put", key, value)

    def __delitem__(self, key: Any) -> None:
        self._away.ask(self._index, "drop", key)

    def __str__(self) -> str:
        return str(self._away.ask(self._index, "str"))

    def __repr__(self) -> str:
        return str(self._away.ask(self._index, "repr"))


def reference_index(value: Any) -> int | None:
    """The number of the solution's object that a reference stands for."""
    index: int | None = value._index if type(value) is Reference else None
    return index


def update(own: Any, new: Any) -> None:
    """Give a mutable argument the contents that the call left it with."""
    if isinstance(own, list):
        own[:] = new
    elif isinstance(own, (dict, set)) and own != new:
        own.clear()
        own.update(new)
