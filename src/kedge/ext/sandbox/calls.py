"""Remote calls from the tests' process to the solution's: both ends, and the data on the pipes.

A value arrives with its type, and a mutable object with its identity: both sides number the objects
of a call in the order in which they occur, so one that is changed or returned is the same there.
Functions, iterators and instances of the solution's classes are sent as references, instances only
once the tests have created one: an arbitrary object could define ``__eq__`` as always true.  A
reference compares by identity.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import operator
import os
import struct
import sys
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

CONSTANTS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None))
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
LONGEST = 10_000  # most characters or entries in a constant sent to the tests
ONE_BY_ONE = 100  # leading items of an iterator, which are sent singly
TOGETHER = 100  # items per message after these
MAX_FRAME = 64 << 20  # bytes


class Untestable(TypeError):
    """A value that cannot be sent from one process to the other."""


# Immutable types -> their constructor arguments.
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
# Mutable types -> arguments for an empty instance.
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
# Stand-ins for instances of subclasses: enumerations, named tuples, ...
BASES: tuple[Any, ...] = (
    int, float, str, bytes, complex, list, dict, tuple, set, frozenset, bytearray,
)  # fmt: skip


def make(name: str, arguments: list[Any]) -> Any:
    """Create an object of a type in the tables."""
    module, _, kind = name.rpartition(".")
    if kind == "defaultdict":
        arguments = [FACTORIES.get(arguments[0])]
    return getattr(importlib.import_module(module), kind)(*arguments)


class Wire:
    """Packs and unpacks the values of one call; ``objects`` are its mutable objects so far.

    ``refer`` gives the packed form of an object that is sent by reference, or None; ``resolve`` the
    object for such a form.
    """

    def __init__(self, refer: Callable[[Any], Any], resolve: Callable[[Any], Any]) -> None:
        self._refer, self._resolve = refer, resolve
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def _add(self, value: Any) -> None:
        self._numbers[id(value)] = len(self.objects)
        self.objects.append(value)

    def pack(self, value: Any) -> Any:
        """Encode a value as JSON: plain values unchanged, others as ``{kind: content}``."""
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:  # as hexadecimal, whose number of digits is unlimited
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
        """Pack an argument of a constructor, whose list has no identity."""
        return [self.pack(x) for x in argument] if type(argument) is list else self.pack(argument)

    def contents(self, value: Any) -> list[Any]:
        """The packed contents of a mutable object."""
        if isinstance(value, dict):
            return [[self.pack(key), self.pack(item)] for key, item in value.items()]
        return [self.pack(item) for item in value]

    def unpack(self, value: Any) -> Any:
        """Decode a packed value."""
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
            dict.update(value, pairs)  # Counter.update would add counts
            return
        items = [self.unpack(item) for item in contents]
        value.clear()
        value.update(items) if isinstance(value, set) else value.extend(items)


def encode_frame(value: Any) -> bytes:
    """Encode a value as a frame: length and JSON."""
    body = json.dumps(value).encode()
    return struct.pack(">Q", len(body)) + body


def write_frame(fd: int, value: Any) -> None:
    """Send one value."""
    write_all(fd, encode_frame(value))


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes, in several calls if needed."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int) -> Any:
    """Read the next value; None at EOF."""
    head = read_exactly(fd, 8)
    if head is None:
        return None
    (size,) = struct.unpack(">Q", head)
    body = read_exactly(fd, size) if size <= MAX_FRAME else None
    return None if body is None else json.loads(body)


def read_exactly(fd: int, size: int) -> bytes | None:
    """Read exactly ``size`` bytes; None if fewer are left."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def describe_error(error: BaseException) -> list[str]:
    """Class and message of an error."""
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)[:300]
    return [type(error).__name__, text]


def _short(value: Any) -> bool:
    return not hasattr(value, "__len__") or len(value) <= LONGEST


# --- the solution's process -----------------------------------------------------------------------

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
          "lt", "le", "gt", "ge")  # fmt: skip
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda thing, *args, **named: thing(*args, **named),
    "method": lambda thing, name, *args, **named: getattr(thing, name)(*args, **named),
    "get": getattr, "set": setattr, "len": len, "list": list, "str": str, "repr": repr,
    "true": bool, "item": operator.getitem, "put": operator.setitem,
    "drop": operator.delitem, "has": operator.contains,
    "take": lambda iterator, count: list(islice(iterator, count)),
    **{name: getattr(operator, f"__{name}__") for name in BINARY},
    **{f"r{name}": lambda b, a, name=name: OPERATIONS[name](a, b) for name in BINARY[:11]},
}  # fmt: skip


class ObjectTable:
    """The solution's names, and the objects that tests refer to."""

    def __init__(self, module: types.ModuleType) -> None:
        self._names = module.__dict__
        self._objects: dict[int, Any] = {}
        self._created: set[type] = set()  # classes that the tests have instantiated

    def describe(self) -> dict[str, Any]:
        """Describe the solution to the tests: names, classes, exceptions and constants."""
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
                    values[name] = self._wire().pack(thing)
        return {"functions": functions, "classes": classes, "errors": errors, "values": values}

    def serve(self, requests: int, answers: int) -> None:
        """Answer requests until EOF."""
        while (request := read_frame(requests)) is not None:
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    answer = self._answer(request)
                frame = encode_frame(answer | {"printed": printed.getvalue()[:LONGEST]})
            except Untestable as error:
                frame = encode_frame({"untestable": str(error)})
            except BaseException as error:
                frame = self._error(error)
            write_all(answers, frame)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        channel = self._wire()
        arguments, named = (channel.unpack(request[name]) for name in ("args", "kwargs"))
        given = list(channel.objects)
        where, what = request["on"], request["do"]
        thing = self._names[where] if isinstance(where, str) else self._objects[where]
        if what == "get" and callable(getattr(thing, *arguments)):
            return {"method": True}
        result = OPERATIONS[what](thing, *arguments, **named)
        if what == "call" and isinstance(thing, type) and not self._is_data(result):
            self._created.add(type(result))
        state = [channel.contents(each) for each in given]
        return {"state": state, "result": channel.pack(result)}

    def _error(self, error: BaseException) -> bytes:
        kind, text = describe_error(error)
        raised: dict[str, Any] = {"kind": kind, "text": text}
        with contextlib.suppress(Exception):
            channel = self._wire()
            packed = [channel.pack(list(error.args)), channel.pack(dict(vars(error)))]
            return encode_frame({"raised": raised | {"parts": packed}})
        return encode_frame({"raised": raised})

    def _is_data(self, value: Any) -> bool:
        if isinstance(value, Iterator):  # packing would exhaust it
            return False
        try:
            Wire(lambda _: None, lambda _: None).pack(value)
        except TypeError:
            return False
        return True

    def _wire(self) -> Wire:
        return Wire(self._refer, lambda form: self._objects[form["o"]])

    def _refer(self, value: Any) -> dict[str, Any] | None:
        if type(value) in self._created:
            kind = "o"
        elif isinstance(value, Iterator):
            kind = "t"
        elif isinstance(value, FUNCTIONS):
            kind = "f"
        else:
            return None
        known = (number for number, kept in self._objects.items() if kept is value)
        number = next(known, len(self._objects))
        self._objects[number] = value
        return {kind: [number, type(value).__name__] if kind == "o" else number}


# --- the tests' process ---------------------------------------------------------------------------


class SolutionDied(BaseException):
    """The solution's process has died; ``except Exception`` in a test does not catch this."""


class RemoteSolution:
    """Client for the solution in the tests' process; ``first`` is ``ObjectTable.describe()``.

    Attributes:
        calls: number of times the tests have used the solution.
        untestable: why a result could not be sent, or "".
    """

    def __init__(self, requests: int, answers: int, first: dict[str, Any]) -> None:
        self._requests, self._answers, self._first = requests, answers, first
        self._classes: dict[str, type] = {}
        self._errors: dict[str, type[Exception]] = {}
        self._created = False
        self.calls, self.untestable = 0, ""

    def names(self, wanted: str, functions: set[str]) -> dict[str, Any]:
        """Proxies and constants for the names of the solution, or only for ``wanted``.

        ``functions`` are treated as functions even if the solution defines classes or exceptions.
        """
        first = self._first
        errors = {n: base for n, base in first["errors"].items() if n not in {wanted, *functions}}
        self._errors = {name: _make_error(name, base) for name, base in errors.items()}
        for name in set(first["classes"]) - functions:
            self._classes[name] = ClassProxy(
                name, (Reference,), {"_remote_solution": self, "_remote": name}
            )
        names: dict[str, Any] = {}
        listed = [wanted] if wanted else [*first["functions"], *first["values"]]
        for name in filter(str.isidentifier, listed):
            if name in first["values"]:
                names[name] = self._wire().unpack(first["values"][name])
            else:
                names[name] = self._classes.get(name) or self._function(name)
        return names | self._errors

    def ask(self, where: str | int, what: str, *arguments: Any, **named: Any) -> Any:
        """Perform an operation on a name or object of the solution; raises what it raised."""
        self.calls += 1
        channel = self._wire()
        try:
            packed = [channel.pack(value) for value in (list(arguments), named)]
        except Untestable as error:
            self.untestable = str(error)
            raise
        given = list(channel.objects)
        request = {"on": where, "do": what, "args": packed[0], "kwargs": packed[1]}
        write_frame(self._requests, request)
        answer = read_frame(self._answers)
        if answer is None:
            raise SolutionDied
        if "untestable" in answer:
            self.untestable = str(answer["untestable"])
            raise Untestable(self.untestable)
        if "raised" in answer:
            raise self._error(**answer["raised"])
        sys.stdout.write(answer.get("printed", ""))
        if what == "get" and "method" in answer:
            return lambda *more, **options: self.ask(where, "method", *arguments, *more, **options)
        self._created |= what == "call" and where in self._classes
        for value, contents in zip(given, answer["state"], strict=True):
            channel.fill(value, contents)
        return channel.unpack(answer["result"])

    def _function(self, where: str | int) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return self.ask(where, "call", *arguments, **named)

        call.__name__ = str(where)
        return call

    def _error(self, kind: str, text: str, parts: Any = None) -> Exception:
        known = self._errors.get(kind) or getattr(builtins, kind, None)
        if not (isinstance(known, type) and issubclass(known, Exception)):
            return RuntimeError(f"{kind}: {text}")
        if parts is None:
            return known(text)
        channel = self._wire()
        arguments, state = channel.unpack(parts[0]), channel.unpack(parts[1])
        error = known(*arguments) if kind in self._errors or arguments else known()
        error.__dict__.update(state)
        return error

    def _wire(self) -> Wire:
        return Wire(_refer, self._resolve)

    def _resolve(self, form: dict[str, Any]) -> Any:
        ((kind, content),) = form.items()
        if kind == "t":
            return self._iterate(content)
        if kind == "f":
            return self._function(content)
        if kind != "o" or not self._created:
            raise TypeError("the solution returned an object that the tests did not create")
        number, name = content
        made: Any = object.__new__(self._classes.get(name, Reference))
        made.__dict__.update(_remote_solution=self, _index=number)
        return made

    def _iterate(self, number: int) -> Iterator[Any]:
        count = 0
        while items := self.ask(number, "take", 1 if count < ONE_BY_ONE else TOGETHER):
            count += len(items)
            yield from items


def _make_error(name: str, base: str) -> type[Exception]:
    """An exception class with the solution's name and its built-in base."""
    kind = getattr(builtins, base, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = Exception
    return type(name, (kind,), {})


def _forward(operation: str, *first: Any) -> Callable[..., Any]:
    def forward(self: Reference, *arguments: Any, **named: Any) -> Any:
        return self._remote_solution.ask(self._index, operation, *first, *arguments, **named)

    return forward


class ClassProxy(type):
    """Proxy for a class of the solution; a test may ask for its attributes or derive from it."""

    _remote_solution: RemoteSolution
    _remote: str

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        """An instance; in a class that a test derives, with the test's methods."""
        made = cls._remote_solution.ask(cls._remote, "call", *arguments, **named)
        if isinstance(made, Reference):
            object.__setattr__(made, "__class__", cls)
        return made

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._remote_solution.ask(cls._remote, "get", name)


class Reference:
    """Proxy for an instance of a solution's class; operations run in the solution's process.

    It compares by identity; the solution's ``__eq__`` is ignored.
    """

    _remote_solution: RemoteSolution
    _index: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._index == self._index

    def __hash__(self) -> int:
        return hash(self._index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._remote_solution.ask(self._index, "list"))

    def __exit__(self, *_: object) -> Any:
        return self._remote_solution.ask(self._index, "method", "__exit__", None, None, None)

    __enter__, __next__ = _forward("method", "__enter__"), _forward("method", "__next__")
    __str__, __repr__ = _forward("str"), _forward("repr")
    __getattr__, __setattr__ = _forward("get"), _forward("set")
    __call__, __len__, __bool__ = _forward("call"), _forward("len"), _forward("true")
    __contains__, __getitem__ = _forward("has"), _forward("item")
    __setitem__, __delitem__ = _forward("put"), _forward("drop")


for _name in (*BINARY, *(f"r{name}" for name in BINARY[:11])):
    setattr(Reference, f"__{_name}__", _forward(_name))


def _refer(value: Any) -> dict[str, Any] | None:
    """The packed form of a reference, or None for other values."""
    return {"o": value._index} if isinstance(value, Reference) else None
