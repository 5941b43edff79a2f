"""Gradients of large weights, added where they lie.

Autograd makes the gradient of a weight anew in every backward pass and then adds it to what is
there.  For an embedding or an output layer of a hundred megabytes, of which a pass touches a few
rows or which it fills tile by tile, making and adding take longer than the work itself: memory
that comes fresh from the operating system is written at a twentieth of the usual speed.
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

_LARGE = 1 << 22  # elements; smaller ones autograd handles well


class GradBuffers:
    """Memory for the gradients of large weights, used again in every step.

    Whoever wants to keep such a ``grad`` beyond the step has to clone it.
    """

    def __init__(self) -> None:
        self._room: dict[Tensor, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Backward passes inside the block add to ``grad`` of large weights by themselves."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def of(self, weight: Tensor) -> Tensor:
        """The gradient of a weight so far; zeros if there is none."""
        if weight.grad is None:
            room = self._room.get(weight)
            if room is None or _kind(room) != _kind(weight):
                room = self._room[weight] = torch.empty_like(weight)
            weight.grad = room.zero_()
        return weight.grad


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device


_current: ContextVar[GradBuffers | None] = ContextVar("gathering", default=None)


def gathered(weight: Tensor) -> Tensor | None:
    """Where a backward pass shall add the gradient of ``weight``; None: give it to autograd."""
    into = _current.get()
    alone = type(weight) is nn.Parameter and weight.is_leaf and weight.requires_grad
    here = weight.device.type == "cpu" and weight.numel() >= _LARGE
    if into is None or not (alone and here):
        return None
    hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return None if hooked else into.of(weight)


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
        into = gathered(weight)
        total = torch.zeros_like(weight) if into is None else into
        total.index_add_(0, ids, g.to(total.dtype))
        return (total if into is None else None), None, None


def embedding(weight: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
    """Rows ``ids`` of ``weight`` float [V, H]; the row ``padding`` gets no gradient."""
    found: Tensor = _Embedding.apply(weight, ids, padding)
    return found
