"""Temporarily replaces the forward of linear layers by faster CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kedge.ops.cpu import matmul
from kedge.ops.cpu.matmul import by_onednn, linear

Forward = Callable[..., Tensor]
PACKED_BYTES = 1 << 30  # of a model's weights; a larger one is sampled from as it is


class Kernels:
    """Swaps linear layers for faster CPU kernels; a no-op where torch's are as fast.

    Args:
        models: already on the device where they will be used.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._layers = [layer for model in models for layer in _layers(model)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context that uses the faster kernels, backward passes included."""
        with _replaced([(layer, partial(_linear, layer)) for layer in self._layers]):
            yield

    @contextmanager
    def packed(self, rows: int) -> Iterator[None]:
        """Context that is faster still where weights do not change and no gradient is needed.

        oneDNN copies weights into its own layout for each product; here that is done once.  The
        results are equal.

        Args:
            rows: of ``x`` in most products.
        """
        layers = [x for x in self._layers if 2 * rows * x.weight.numel() >= matmul.SMALLEST]
        size = sum(x.weight.numel() * x.weight.element_size() for x in layers)
        if size > PACKED_BYTES or torch.is_autocast_enabled("cpu"):
            layers = []
        with _replaced([(x, _packed_forward(x, rows)) for x in layers]), self.active():
            yield


@contextmanager
def _replaced(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Context in which layers have another forward."""
    # An instance attribute `forward` was set by the user or by an outer context.
    patched = [(layer, forward) for layer, forward in forwards if "forward" not in vars(layer)]
    try:
        for layer, forward in patched:
            layer.__dict__["forward"] = forward
        yield
    finally:
        for layer, forward in patched:
            if vars(layer).get("forward") is forward:
                del layer.__dict__["forward"]


def _layers(model: nn.Module) -> Iterator[nn.Linear | Conv1D]:
    """The layers to patch."""
    for layer in model.modules():
        kind, weight = type(layer), getattr(layer, "weight", None)
        if kind in (nn.Linear, Conv1D) and type(weight) is nn.Parameter and by_onednn(weight):
            yield layer  # type: ignore[misc]


def _weight(layer: nn.Linear | Conv1D) -> Tensor:
    """Float [outputs, inputs]."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def _linear(layer: nn.Linear | Conv1D, *args: Tensor, **named: Tensor) -> Tensor:
    (x,) = (*args, *named.values())  # called input by one class and x by the other
    return linear(x, _weight(layer), layer.bias)


def _packed_forward(layer: nn.Linear | Conv1D, rows: int) -> Forward:
    bias, smallest = layer.bias, matmul.SMALLEST // (2 * layer.weight.numel())
    packed = torch.ops.mkldnn._reorder_linear_weight(_weight(layer).detach(), rows)

    def forward(*args: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*args, *named.values())
        few = x.numel() < smallest * x.shape[-1]
        if few or x.dtype != torch.float32 or torch.is_grad_enabled():
            return _linear(layer, x)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return result

    return forward
