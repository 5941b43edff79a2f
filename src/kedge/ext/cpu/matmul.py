"""Matrix products on a CPU, with the fastest library bundled with torch.

torch multiplies float32 matrices with Intel MKL, which does not use AVX-512 on processors of other
vendors.  oneDNN, also part of torch, does: 210 GFLOP/s per core on a fifth-generation AMD EPYC,
against 95 with MKL.  With AVX2 MKL is the faster one, except for products of a few rows with
packed weights.

Under autocast, processors that multiply bfloat16 natively (AVX512_BF16 or AMX) do so.  torch's
autocast converts trained weights once per forward pass, and frozen weights at every use; here a
weight is converted once per block of passes, and its gradient is float32.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from kedge.ops.products import kernels_enabled

SMALLEST = 4_000_000  # operations; below, the overhead of oneDNN cancels the gain
_WIDE, _MANY_ROWS, _LARGE = 512, 1024, 2 << 20
_CPUINFO = Path("/proc/cpuinfo")
# Up to this length, bfloat16 attention's backward pass takes twice as long as float32's.
SHORT_ATTENTION = 384


@cache
def _amd() -> bool:
    """Whether this is an AMD processor with AVX2 or AVX-512."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    vendor = _CPUINFO.read_text(errors="replace") if _CPUINFO.exists() else platform.processor()
    return "AuthenticAMD" in vendor and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _unused_by_mkl() -> bool:
    """Whether this is an AMD processor with AVX-512."""
    return _amd() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _may_choose(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and kernels_enabled()


def by_onednn(x: Tensor) -> bool:
    """Whether oneDNN is faster for large products with ``x`` on this machine.

    Always False with KEDGE_CPU_KERNELS=0 in the environment, or after
    ``torch.backends.mkldnn.set_flags(False)``.
    """
    return _may_choose(x) and _unused_by_mkl()


def by_prepacked_weights(w: Tensor) -> bool:
    """Whether packing ``w`` for oneDNN makes products of a few rows faster on this machine."""
    return _may_choose(w) and _amd()


def by_rule(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product x w^T + bias [m, n] by oneDNN, without gradient; None where torch is as fast.

    ``x`` float [m, k] and ``w`` float [n, k] may have any strides; ``bias`` is float [n].
    """
    if 2 * x.numel() * len(w) < SMALLEST or not by_onednn(x):
        return None
    if not _dense(w):
        w = w.contiguous()  # oneDNN does not support overlapping rows
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return result


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x w^T + bias, without gradient; shapes as in `by_rule`."""
    result = by_rule(x, w, bias)
    if result is None:
        return torch.mm(x, w.T) if bias is None else torch.addmm(bias, x, w.T)
    return result


def _dense(w: Tensor) -> bool:
    (n, k), (row, column) = w.shape, w.stride()
    return (column == 1 and row >= k) or (row == 1 and column >= n)


def outer(g: Tensor, x: Tensor) -> Tensor:
    """g^T x float [n, k] of g [m, n] and x [m, k], without gradient."""
    if x.shape[1] < _WIDE:  # oneDNN prefers a shorter first axis in its result
        return product(g.T, x.T) if g.shape[1] <= x.shape[1] else product(x.T, g.T).T
    large = len(g) >= _MANY_ROWS and g.shape[1] * x.shape[1] >= _LARGE
    if large and by_onednn(g):
        return product(g.T.contiguous(), x.T.contiguous())  # faster than oneDNN's own copies
    return product(g.T, x.T)  # contiguous, or autograd would copy it


def input_gradient(g: Tensor, w: Tensor) -> Tensor:
    """The product g w float [m, k] of g [m, n] and w [n, k], without gradient."""
    large = len(g) >= _MANY_ROWS and w.shape[0] > w.shape[1] >= _WIDE
    return product(g, w.T.contiguous() if large and by_onednn(g) else w.T)  # as in outer


class _Linear(torch.autograd.Function):
    """x w^T + bias for x [m, k]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        return product(x, w, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Any) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        g, (of_x, of_w, of_bias) = up[0], ctx.needs_input_grad
        return (
            input_gradient(g, w) if of_x else None,
            outer(g, x) if of_w else None,
            g.sum(0) if of_bias else None,
        )


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` with gradient, on the faster library."""
    large = 2 * x.numel() * len(w) >= SMALLEST and x.dtype == w.dtype
    if not (large and by_onednn(x)) or torch.is_autocast_enabled("cpu"):
        return functional.linear(x, w, bias)
    result: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), w, bias)
    return result.view(*x.shape[:-1], len(w))


@cache
def multiplies_bf16() -> bool:
    """Whether this processor multiplies bfloat16 and torch's oneDNN can pack weights for it."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


SLOW_BF16 = (
    "bf16 on this processor is several times slower than float32; leave --bf16 out (bf16=False)"
)


def emulates_bf16() -> bool:
    """Whether products in bfloat16 are slow here: on x86 without instructions for them."""
    return platform.machine().lower() in ("x86_64", "amd64") and not multiplies_bf16()


def may_run_in_bf16(weight: Tensor) -> bool:
    """Whether products with a weight use native bfloat16 under autocast."""
    low = weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"
    return low and multiplies_bf16() and kernels_enabled()


def autocasts_to_bf16() -> bool:
    """Whether products on the CPU run in native bfloat16 now."""
    asked = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return asked and multiplies_bf16() and kernels_enabled()


class Bf16Weight:
    """The weight that ``read`` returns in bfloat16, converted again after it has changed."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read
        self._copy: Tensor | None = None
        self._version = -1  # version of the weight that was converted

    def forget(self) -> None:
        """Convert at the next use; keeps the memory of a trained weight's copy."""
        self._version = -1
        if not self._read().requires_grad:
            self._copy = None

    def expire(self) -> None:
        """Convert at the next use if the weight trains."""
        if self._read().requires_grad:
            self._version = -1

    def get(self) -> Tensor:
        """bfloat16 [n, k], without gradient."""
        weight = self._read().detach()
        if weight.dtype == torch.bfloat16:
            return weight
        copy = self._copy
        if copy is None:
            copy = self._copy = torch.empty_like(weight, dtype=torch.bfloat16)
            self._version = -1
        if self._version != weight._version:
            copy.copy_(weight)
            self._version = weight._version
        return copy


class _Bf16Linear(torch.autograd.Function):
    """x w^T + bias in bfloat16 for x [m, k]; ``low`` is w in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, low: Tensor, bias: Tensor | None) -> Tensor:
        rounded = x.to(torch.bfloat16)
        ctx.save_for_backward(rounded if ctx.needs_input_grad[1] else None, low)
        ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(torch.bfloat16)
        # functional.linear would first copy the bias to every row.
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rounded, low, bias, "none", [], "")
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Any) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        g, (of_x, of_w, _, of_bias) = up[0], ctx.needs_input_grad
        kind_of_x, kind_of_w, kind_of_bias = ctx.dtypes
        return (
            torch.mm(g, low).to(kind_of_x) if of_x else None,
            torch.mm(g.T, x).to(kind_of_w) if of_w else None,
            None,
            g.sum(0).to(kind_of_bias) if of_bias else None,
        )


def bf16_linear(x: Tensor, w: Tensor, low: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` in bfloat16, with gradients in the dtypes of the inputs.

    ``low`` is ``w`` float [n, k] in bfloat16, and ``w`` receives the gradient.
    """
    result: Tensor = _Bf16Linear.apply(x.reshape(-1, x.shape[-1]), w, low, bias)
    return result.view(*x.shape[:-1], len(w))
