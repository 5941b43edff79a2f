"""Temporarily replaces the forward of linear layers by faster CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kedge.ops.cpu.matmul import by_onednn, linear

Forward = Callable[[Tensor], Tensor]


class Kernels:
    """Swaps linear layers for faster CPU kernels; a no-op where torch's are as fast.

    Args:
        models: already on the device where they will be used.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._layers = [pair for model in models for pair in _layers(model)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context that uses the faster kernels, backward passes included."""
        # An instance attribute `forward` was set by the user or by an outer context.
        patched = [(x, forward) for x, forward in self._layers if "forward" not in vars(x)]
        try:
            for layer, forward in patched:
                layer.__dict__["forward"] = forward
            yield
        finally:
            for layer, forward in patched:
                if vars(layer).get("forward") is forward:
                    del layer.__dict__["forward"]


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """The layers to patch, and their new forward."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if type(weight) is not nn.Parameter or not by_onednn(weight):
            continue
        if type(layer) is nn.Linear:
            yield layer, partial(_linear, layer)
        elif type(layer) is Conv1D:
            yield layer, partial(_conv1d, layer)


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _conv1d(layer: Conv1D, x: Tensor) -> Tensor:
    return linear(x, layer.weight.T, layer.bias)
