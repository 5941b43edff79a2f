"""Replays the decode step of a model on a CPU as a flat list of torch calls.

In small models, much of a step is Python: modules, keyword arguments, masks, caches.  The first
steps run as usual while their torch calls are recorded; from then on the same calls run alone, on
the same weights.  Sizes that follow the number of rows or of cached tokens are found by comparing
recordings.  A program is used only if it repeats the logits of a recorded step bit by bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from kedge.backends.hf.kv_cache import GrowingLayer
from kedge.ops.cpu.matmul import cpu_kernels_enabled
from kedge.ops.cpu.patch import is_replaced, run_layer

Step = Callable[[Tensor, Tensor, Tensor | None], Tensor]
MIN_STEPS = 24  # fewer do not repay what the recordings cost
_UNCHECKED = 256  # tokens, or as many as there are, until a step is compared again
_INPUTS = ("tokens", "position", "mask")
_PACKAGES = {"torch", "transformers", "peft", "kedge"}  # whose modules keep no hidden state
# Calls that return no tensor and can be left out: what they return are sizes and types.
_METADATA = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "__len__", "element_size"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device"),
    *("storage_offset", "__get__", "result_type"),
}
_UNCHANGED = {"dropout", "to", "float", "type_as"}  # left out where they return their input
_DIRECT = {functional.layer_norm: torch.layer_norm}  # less Python, the same arguments


class Unrecordable(Exception):
    """A step is not a fixed list of torch calls."""


def can_record(model: nn.Module, layers: Sequence[Any]) -> bool:
    """Whether the decode step may be recorded; ``KEDGE_CPU_KERNELS=0`` switches it off."""
    tensors = chain(model.parameters(), model.buffers())
    return (
        cpu_kernels_enabled()
        and all(type(x) is not DTensor and x.device.type == "cpu" for x in tensors)
        and all(isinstance(layer, GrowingLayer) for layer in layers)
        and not torch.is_grad_enabled()
        and all(_is_plain(module) for module in model.modules())
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is of a known package, without hooks or a ``forward`` of others."""
    hooks = chain(
        *(module._forward_hooks.values(), module._forward_pre_hooks.values()),
        *(_global_forward_hooks.values(), _global_forward_pre_hooks.values()),
    )
    if not is_replaced(module) and "forward" in vars(module):
        return False
    return type(module).__module__.partition(".")[0] in _PACKAGES and all(
        getattr(hook, "__module__", "").startswith("transformers.utils.") for hook in hooks
    )


class Recording(TorchFunctionMode):
    """Context that records the torch calls of one step.

    Args:
        layers: the cache; ``update`` of a layer is one call.
        inputs: tensors that differ from step to step, by name.
    """

    def __init__(self, layers: Sequence[GrowingLayer], inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.rows, self.used = len(inputs["tokens"]), layers[0].keys.shape[-2]
        self.lines: list[str] = []  # of Python; <i> stands for ints[i]
        self.ints: list[int] = []
        self.constants: list[Any] = []  # c0, c1, ...: functions, weights, types
        self.failure: str | None = None
        self.result = ""
        self._names = WeakTensorKeyDictionary()  # of inputs and results
        self._layers = {id(layer): i for i, layer in enumerate(layers)}
        self._autocast = torch.is_autocast_enabled("cpu")
        for name, x in inputs.items():
            self._name(x, name)

    def finish(self, logits: Tensor) -> None:
        """Declare the result."""
        self.result = self._text(logits)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and record the call."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if name in _METADATA and not isinstance(result, Tensor):
            return result
        several = isinstance(result, tuple | list) and any(isinstance(x, Tensor) for x in result)
        if isinstance(result, Tensor) or several:
            same = bool(args) and result is args[0] and name in _UNCHANGED
            if not (same and not kwargs.get("inplace")):
                self._record(func, args, kwargs, result)
        elif name == "__setitem__":
            self._record(func, args, kwargs, None)
        elif any(isinstance(x, Tensor) for x in (args[0] if _is_list(args) else args)):
            self.failure = f"{name} reads a tensor on the host"
        return result

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        variable = f"v{len(self.lines)}"
        parts = [self._text(x) for x in args]
        parts += [f"{name}={self._text(x)}" for name, x in kwargs.items()]
        autocast = torch.is_autocast_enabled("cpu")
        if func is GrowingLayer.update:
            call = f"{parts.pop(0)}.update"
        elif func is run_layer:
            call = f"{parts.pop(0)}.forward"
        elif autocast == self._autocast:
            call = self._constant(_DIRECT.get(func, func))
        elif self._autocast:
            call = self._constant(_without_autocast)
            parts.insert(0, self._constant(func))
        else:
            self.failure = "it turns autocast on"
            return
        self.lines.append(f"{variable} = {call}({', '.join(parts)})")
        for i, x in enumerate(result if isinstance(result, tuple | list) else ()):
            self._name(x, f"{variable}[{i}]")
        self._name(result, variable)

    def _name(self, x: Any, name: str) -> None:
        if isinstance(x, Tensor):
            self._names[x] = name

    def _text(self, x: Any) -> str:
        """Python for an argument."""
        if isinstance(x, Tensor):
            name: str | None = self._names.get(x)
            return self._constant(x) if name is None else name
        if isinstance(x, tuple | list):
            inner = "".join(self._text(y) + ", " for y in x)
            return f"[{inner}]" if isinstance(x, list) else f"({inner})"
        if isinstance(x, slice):
            return f"slice({self._text(x.start)}, {self._text(x.stop)}, {self._text(x.step)})"
        if x is None or x is Ellipsis or isinstance(x, bool):
            return repr(x)
        if isinstance(x, int):
            self.ints.append(x)
            return f"<{len(self.ints) - 1}>"
        if isinstance(x, float) and isfinite(x):
            return repr(x)
        return f"layers[{self._layers[id(x)]}]" if id(x) in self._layers else self._constant(x)

    def _constant(self, x: Any) -> str:
        self.constants.append(x)
        return f"c{len(self.constants) - 1}"


def _is_list(args: Any) -> bool:
    return bool(args) and isinstance(args[0], tuple | list)


def _without_autocast(function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return function(*args, **kwargs)


class Program:
    """The calls of a step, for any number of cached tokens.

    Args:
        first: a recording.
        second: one of as many rows and more tokens.

    Raises:
        Unrecordable: they are not the same calls.
    """

    def __init__(self, first: Recording, second: Recording) -> None:
        self._first, self._all_rows = first, False
        self._scales = [False] * len(first.ints)  # with the number of rows
        self._slopes = [0] * len(first.ints)  # per cached token
        self._check_calls(second)
        for i, (a, b) in enumerate(zip(first.ints, second.ints, strict=True)):
            self._slopes[i], rest = divmod(b - a, second.used - first.used)
            if rest:
                raise Unrecordable(f"a size of {a} became {b}")
        self._until = second.used + max(_UNCHECKED, second.used)
        self._run = self._compile()

    def covers(self, rows: int, used: int) -> bool:
        """Whether the sizes are known for these numbers of rows and of cached tokens.

        A model may do something else from some length on, so it is compared again as texts grow.
        """
        return used < self._until and (self._all_rows or rows == self._first.rows)

    def add(self, other: Recording) -> None:
        """Compare with another recording; learn from other numbers of rows what follows them.

        Raises:
            Unrecordable: they are not the same calls.
        """
        self._check_calls(other)
        first, more = self._first, other.used - self._first.used
        for i, (a, b) in enumerate(zip(first.ints, other.ints, strict=True)):
            expected = a + self._slopes[i] * more
            if b != expected:
                self._scales[i] |= not self._all_rows
                if not self._scales[i] or b * first.rows != expected * other.rows:
                    raise Unrecordable(f"a size of {expected} became {b}")
        self._until = max(self._until, other.used + max(_UNCHECKED, other.used))
        if other.rows != first.rows and not self._all_rows:
            self._all_rows = True
            self._run = self._compile()

    def _check_calls(self, other: Recording) -> None:
        first = self._first
        for recording in (first, other):
            if recording.failure is not None:
                raise Unrecordable(recording.failure)
        if first.lines != other.lines or first.result != other.result:
            raise Unrecordable("two steps made different calls")
        for a, b in zip(first.constants, other.constants, strict=True):
            if a is not b and (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b):
                raise Unrecordable("two steps used different tensors or functions")

    def _compile(self) -> Callable[..., Tensor]:
        first, sizes = self._first, dict[str, str]()

        def size(match: re.Match[str]) -> str:
            i = int(match[1])
            value = str(first.ints[i])
            if not (self._slopes[i] or self._scales[i]):
                return value
            value = f"({value} + {self._slopes[i]} * more)"
            if self._scales[i]:
                value += f" * rows // {first.rows}"
            return sizes.setdefault(value, f"n{len(sizes)}")

        lines = [re.sub(r"<(\d+)>", size, line) for line in first.lines]
        last = {v: i for i, line in enumerate(lines) for v in re.findall(r"\bv\d+", line)}
        ends: dict[int, list[str]] = {}
        for variable, i in last.items():
            if variable != first.result.partition("[")[0]:
                ends.setdefault(i, []).append(variable)
        body = [f"{name} = {value}" for value, name in sizes.items()]
        for i, line in enumerate(lines):
            body += [line, *([f"del {', '.join(ends[i])}"] if i in ends else [])]
        constants = {f"c{i}": x for i, x in enumerate(first.constants)}
        given = ", ".join(["layers", *_INPUTS, "rows", "more", *(f"{c}={c}" for c in constants)])
        source = "\n ".join([f"def run({given}):", *body, f"return {first.result}"])
        exec(compile(source, "<decode step>", "exec"), constants)
        return constants.pop("run")  # a cycle would hold all weights

    def __call__(self, layers: Sequence[GrowingLayer], *inputs: Tensor | None) -> Tensor:
        """Logits [b, V]; appends to the layers."""
        more = layers[0].keys.shape[-2] - self._first.used
        # Calls cost less in this mode; casts of weights that autocast keeps must not be of it.
        with torch.inference_mode(not torch.is_autocast_enabled("cpu")), torch.no_grad():
            return self._run(layers, *inputs, len(inputs[0]), more)  # type: ignore[arg-type]


class RecordedStep:
    """The decode step of a model while nothing but the values of its weights changes.

    Batches of any size may use it, one after the other.
    """

    def __init__(self, model: nn.Module) -> None:
        self.failure: str | None = None  # why the model's own code runs
        self._model: nn.Module | None = model  # until it is checked
        self._recordings: dict[bool, Recording] = {}  # by whether there is a mask
        self._programs: dict[bool, Program] = {}

    def __call__(
        self,
        step: Step,
        layers: Sequence[GrowingLayer],
        tokens: Tensor,
        position: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """What ``step`` returns for the tokens int64 [b], positions [b, 1] and mask [b, used + 1].

        ``step`` appends the tokens to the layers.
        """
        inputs, key = (tokens, position, mask), mask is None
        if self._model is not None:
            can = can_record(self._model, layers)
            self.failure, self._model = None if can else "the model or its cache is special", None
        if self.failure is not None:
            return step(*inputs)
        program = self._programs.get(key)
        if program is not None and program.covers(len(tokens), layers[0].keys.shape[-2]):
            return program(layers, *inputs)
        named = {n: x for n, x in zip(_INPUTS, inputs, strict=True) if x is not None}
        with Recording(layers, named) as recording:
            logits = step(*inputs)
        recording.finish(logits)
        try:
            ready = self._learn(recording, key)
            if ready is None or _repeats(ready, layers, recording.used, inputs, logits):
                return logits
            raise Unrecordable("its calls gave other logits when they were repeated")
        except Unrecordable as error:
            self.failure = str(error)
            self._programs, self._recordings = {}, {}
        for layer in layers:
            layer.show(recording.used)
        return step(*inputs)

    def _learn(self, recording: Recording, key: bool) -> Program | None:
        """The program, if it can run the step of this recording."""
        program, earlier = self._programs.get(key), self._recordings.get(key)
        if program is not None:
            program.add(recording)
        elif (
            earlier is not None and earlier.rows == recording.rows and earlier.used < recording.used
        ):
            program = self._programs[key] = Program(earlier, recording)
        else:
            self._recordings[key] = recording
        return program


def _repeats(
    program: Program,
    layers: Sequence[GrowingLayer],
    used: int,
    inputs: Sequence[Tensor | None],
    logits: Tensor,
) -> bool:
    """Whether a program gives the logits of the step that was just taken."""
    for layer in layers:
        layer.show(used)
    try:
        return torch.equal(program(layers, *inputs), logits)
    except Exception:  # whatever torch raises where a size is wrong
        return False
