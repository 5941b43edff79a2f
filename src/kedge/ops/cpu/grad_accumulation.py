"""In-place accumulation of gradients of large weights.

Autograd allocates the gradient of a weight in every backward pass and then adds it to ``grad``.
For an embedding or output layer of a hundred megabytes, of which a pass touches a few rows or
which it fills tile by tile, that takes longer than the work itself: writing to newly allocated
memory is about 20 times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_LARGE = 1 << 22  # elements; autograd is fast enough below


class GradBuffers:
    """Buffers for the gradients of large weights, reused in every optimizer step.

    To keep such a ``grad`` beyond the step, clone it.
    """

    def __init__(self) -> None:
        self._buffers: dict[Tensor, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which backward passes add directly to ``grad`` of large weights."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def of(self, weight: Tensor) -> Tensor:
        """The accumulated gradient of a weight; zeros if there is none."""
        if weight.grad is None:
            buffer = self._buffers.get(weight)
            if buffer is None or _layout(buffer) != _layout(weight):
                buffer = self._buffers[weight] = torch.empty_like(weight)
            weight.grad = buffer.zero_()
        return weight.grad


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device


_current: ContextVar[GradBuffers | None] = ContextVar("grad_buffers", default=None)


def gathered(weight: Tensor) -> Tensor | None:
    """The buffer for a backward pass to add the gradient of ``weight`` to; None: use autograd."""
    buffers = _current.get()
    plain = type(weight) is nn.Parameter and weight.is_leaf and weight.requires_grad
    large = weight.device.type == "cpu" and weight.numel() >= _LARGE
    if buffers is None or not (plain and large):
        return None
    hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return None if hooked else buffers.of(weight)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.padding = padding
        return functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Any) -> tuple[Tensor | None, None, None]:
        weight, ids = ctx.saved_tensors
        g, ids = up[0].reshape(-1, weight.shape[1]), ids.reshape(-1)
        if ctx.padding is not None:
            kept = ids != ctx.padding
            g, ids = g[kept], ids[kept]
        buffer = gathered(weight)
        total = torch.zeros_like(weight) if buffer is None else buffer
        total.index_add_(0, ids, g.to(total.dtype))
        return (total if buffer is None else None), None, None


def embedding(weight: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
    """Rows ``ids`` of ``weight`` float [V, H]; the row ``padding`` gets no gradient."""
    rows: Tensor = _Embedding.apply(weight, ids, padding)
    return rows
