"""bfloat16 on CPUs that multiply it natively (AVX512_BF16 or AMX), under autocast.

torch's autocast converts trained weights once per forward pass, and frozen weights at every
use.  Here a weight is converted once per block of passes, and its gradient is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kedge.ops.cpu.matmul import cpu_kernels_enabled

# Up to this length, bfloat16 attention's backward pass takes twice as long as float32's.
SHORT_ATTENTION = 384


@cache
def multiplies_bf16() -> bool:
    """Whether this processor multiplies bfloat16 and torch's oneDNN can pack weights for it."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def may_run_in_bf16(weight: Tensor) -> bool:
    """Whether products with a weight use native bfloat16 under autocast."""
    low = weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"
    return low and multiplies_bf16() and cpu_kernels_enabled()


def autocasts_to_bf16() -> bool:
    """Whether products on the CPU run in native bfloat16 now."""
    asked = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return asked and multiplies_bf16() and cpu_kernels_enabled()


class Bf16Weight:
    """The weight of a layer in bfloat16, converted again after it has changed.

    Args:
        read: returns the weight, float [n, k].
    """

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


class _Linear(torch.autograd.Function):
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

    Args:
        x: float [..., k].
        w: float [n, k]; receives the gradient.
        low: bfloat16 [n, k]; ``w``, converted.
        bias: float [n].

    Returns:
        bfloat16 [..., n].
    """
    result: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), w, low, bias)
    return result.view(*x.shape[:-1], len(w))


def float32_attention(attention: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function for transformers that uses float32 where that is faster.

    Under autocast, for short rows and for single tokens: their keys are float32 after the rotary
    embedding, so that bfloat16 would convert all of them for each token.
    """

    @wraps(attention)
    def precise(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        short = query.shape[2] == 1 or key.shape[2] <= SHORT_ATTENTION
        on_cpu = query.device.type == "cpu" and (
            attention_mask is None or attention_mask.dtype == torch.bool
        )
        if not (short and on_cpu and autocasts_to_bf16()):
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            inputs = (x.to(torch.float32) for x in (query, key, value))
            return attention(module, *inputs, attention_mask, *args, **kwargs)

    return precise
