"""A simulated accelerator for tests on machines without one.

Its tensors live in CPU memory, so all values are real, but they behave like GPU tensors:

* mixing them with CPU tensors of one or more dimensions raises ``RuntimeError``;
* ``numpy()`` without ``cpu()`` raises ``TypeError``;
* every wait of the host (``item``, ``tolist``, ``nonzero``, a boolean index, a copy to the host)
  and every copy to the device is counted, with the line of Kedge that caused it; a tensor that is
  moved to the device a second time is counted as "again to device".

It needs only torch and accelerate. It does not test kernels, speed or memory, cannot detect an
asynchronous copy that is read too early, and autocast only casts matrix products and attention.
Every operation passes through Python, so keep the models tiny.

    with strict_accelerator() as waits:
        trainer = PPOTrainer(...)  # Accelerator().device is the simulated one
        trainer.train()
    print(total_waits(), waits.most_common(10))

Needs torch 2.8 or newer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "strict"
_KEDGE = str(Path(__file__).parents[1] / "src" / "kedge") + "/"
_WAITS: Counter[str] = Counter()
_COPIED: dict[tuple[int, ...], Tensor] = {}  # tensors copied to the device, kept alive
_WAITING = ("aten.nonzero", "aten._unique2", "aten.unique_", "aten.masked_select")
_AUTOCAST = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "scaled_dot_product_attention")
_libraries: list[torch.library.Library] = []  # a registration lasts as long as its library
_aten: Any = torch.ops.aten
_cpu_tensor, _cpu_as_tensor = torch.tensor, torch.as_tensor


@contextlib.contextmanager
def strict_accelerator() -> Iterator[Counter[str]]:
    """Make the simulated accelerator the device of accelerate; not reentrant.

    Yields:
        Counts of synchronizations and copies so far, keyed like ``"item loop/stages.py:109"``.
    """
    from accelerate import Accelerator

    device = strict_device()
    before, run = Accelerator.device, threading.Thread.run
    swap = torch.__future__.get_swap_module_params_on_conversion()

    def run_in_mode(thread: threading.Thread) -> None:  # a dispatch mode belongs to one thread
        with _Factories():
            run(thread)

    Accelerator.device = property(lambda accelerator: device)
    torch.tensor, torch.as_tensor = _tensor, _as_tensor  # type: ignore[assignment]
    threading.Thread.run = run_in_mode  # type: ignore[method-assign, assignment]
    torch.__future__.set_swap_module_params_on_conversion(True)  # or .to() unties weights
    _WAITS.clear()
    _COPIED.clear()
    try:
        with _Factories():
            yield _WAITS
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
        torch.tensor, torch.as_tensor = _cpu_tensor, _cpu_as_tensor
        torch.__future__.set_swap_module_params_on_conversion(swap)
        Accelerator.device = before
        _COPIED.clear()


def total_waits() -> int:
    """How often the host has waited so far: all counts but those of copies to the device."""
    return sum(count for key, count in _WAITS.items() if "to device" not in key)


@functools.cache
def strict_device() -> torch.device:
    """The device itself, registered with torch on the first call."""
    from torch.utils import backend_registration as backends

    class Module(backends._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

        def get_rng_state(self, device: Any = None) -> Tensor:
            return torch.get_rng_state()  # random numbers come from the CPU generator

        def set_rng_state(self, state: Tensor, device: Any = None) -> None:
            pass

    backends._setup_privateuseone_for_python_backend(rename=NAME, backend_module=Module())
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    for name in _AUTOCAST:
        aten.impl(name, _autocast(getattr(_aten, name).default), "AutocastPrivateUse1")
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend([aten, rest])
    return torch.device(NAME, 0)


class _StrictTensor(torch.Tensor):
    """A tensor on the simulated device; ``cpu_tensor`` is the CPU tensor with its values."""

    cpu_tensor: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, cpu_tensor: Tensor) -> _StrictTensor:
        new: _StrictTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            cpu_tensor.size(),
            strides=cpu_tensor.stride(),
            storage_offset=cpu_tensor.storage_offset(),
            dtype=cpu_tensor.dtype,
            layout=cpu_tensor.layout,
            device=strict_device(),
            requires_grad=False,
        )
        new.cpu_tensor = cpu_tensor
        return new

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return _dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        _count("tolist")
        return self.cpu_tensor.detach().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("cannot convert an accelerator tensor to numpy; call .cpu() first")

    def data_ptr(self) -> int:
        return self.cpu_tensor.data_ptr()

    def untyped_storage(self) -> Any:
        return self.cpu_tensor.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Tensor = _StrictTensor(self.cpu_tensor.detach().clone())
            if getattr(self, "_is_param", False):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.cpu_tensor})"


class _Factories(TorchDispatchMode):
    """Intercepts operations without a tensor argument, such as factories with ``device=``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Run one operation of torch on the CPU tensors behind its arguments."""
    if func is _aten._to_copy.default:
        return _to_copy(args[0], kwargs)
    if func is _aten.copy_.default:
        return _copy_(*args)
    tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
    strict = [x for x in tensors if isinstance(x, _StrictTensor)]
    to_strict = _is_strict(kwargs.get("device"))
    if not (strict or to_strict):
        return func(*args, **kwargs)
    if strict:
        _check_and_count(func, args, [x for x in tensors if not isinstance(x, _StrictTensor)])
    if to_strict:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*_map(_unwrap, args), **_map(_unwrap, kwargs))
    if func is _aten._local_scalar_dense.default:
        return result
    same = {id(x.cpu_tensor): x for x in strict}  # an in-place operation returns its argument
    return _map(lambda x: _wrap(x, same), result)


def _wrap(x: Any, same: Mapping[int, Tensor]) -> Any:
    if not isinstance(x, Tensor):
        return x
    return same[id(x)] if id(x) in same else _StrictTensor(x)


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, Mapping):
        x = list(x.values())
    return [leaf for part in x for leaf in _leaves(part)] if isinstance(x, list | tuple) else [x]


def _map(change: Callable[[Any], Any], x: Any) -> Any:
    """Apply ``change`` to every leaf; several times faster than torch's ``tree_map``."""
    if isinstance(x, list | tuple):
        return type(x)([_map(change, part) for part in x])
    if isinstance(x, Mapping):
        return {key: _map(change, part) for key, part in x.items()}
    return change(x)


def _check_and_count(func: Any, args: tuple[Any, ...], on_cpu: list[Tensor]) -> None:
    name = str(func)
    indexing = name.startswith(("aten.index.Tensor", "aten.index_put"))
    if func is _aten._local_scalar_dense.default:
        _count("item")
    if name.startswith(_WAITING):
        _count(name)
    if indexing and any(isinstance(i, _StrictTensor) and i.dtype == torch.bool for i in args[1]):
        _count("boolean index")
    mixed = [tuple(x.shape) for x in on_cpu if x.dim() > 0]  # torch takes CPU scalars anywhere
    if mixed and not indexing:
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {name} got tensors on {NAME} and, on"
            f" the CPU, of shapes {mixed}"
        )
    if mixed:
        _count("index from host")


def _to_copy(source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    device = kwargs.get("device")
    to_strict = isinstance(source, _StrictTensor) if device is None else _is_strict(device)
    if isinstance(source, _StrictTensor) != to_strict:
        _count_copy(source, to_strict)
    rest = {k: v for k, v in kwargs.items() if k != "device"}
    copied: Tensor = _aten._to_copy.default(_unwrap(source), **rest)
    return _StrictTensor(copied) if to_strict else copied


def _copy_(target: Tensor, source: Tensor, *rest: Any) -> Tensor:
    if isinstance(target, _StrictTensor) != isinstance(source, _StrictTensor):
        _count("to device" if isinstance(target, _StrictTensor) else "to host")
    _unwrap(target).copy_(_unwrap(source))
    return target


def _unwrap(x: Any) -> Any:
    return x.cpu_tensor if isinstance(x, _StrictTensor) else x


def _is_strict(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _count(kind: str) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_KEDGE):
            _WAITS[f"{kind} {file.removeprefix(_KEDGE)}:{frame.f_lineno}"] += 1
            return
        frame = frame.f_back
    _WAITS[f"{kind} elsewhere"] += 1


def _count_copy(source: Tensor, to_device: bool) -> None:
    if not to_device:
        _count("to host")
        return
    key = (source.data_ptr(), source._version, *source.shape)
    _count("again to device" if key in _COPIED and source.numel() > 1 else "to device")
    _COPIED[key] = source.detach()  # the tensor itself may be swapped for another


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    tensor = _cpu_tensor(data, dtype=dtype, **options)
    if not _is_strict(device):
        return tensor
    _count("to device")
    return _StrictTensor(_unwrap(tensor))


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    if not isinstance(data, Tensor):
        return _tensor(data, dtype=dtype, device=device)
    return data if dtype is None and device is None else data.to(device=device, dtype=dtype)


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _StrictTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _StrictTensor(torch.empty_strided(size, stride, dtype=dtype))


def _autocast(operation: Callable[..., Any]) -> Callable[..., Any]:
    keys: Any = torch._C.DispatchKey
    key = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype(NAME)

        def cast(x: Any) -> Any:
            float32 = isinstance(x, _StrictTensor) and x.dtype == torch.float32
            return x.to(low) if float32 else x

        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*_map(cast, args), **_map(cast, kwargs))

    return run
