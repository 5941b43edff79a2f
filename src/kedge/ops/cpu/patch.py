"""Temporarily replaces the forward of supported CPU layers by faster kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kedge.ops.cpu.grad_accumulation import GradBuffers, embedding
from kedge.ops.cpu.matmul import by_onednn, linear

Forward = Callable[[Tensor], Tensor]


class Kernels:
    """Swaps supported layers for faster CPU kernels; a no-op elsewhere.

    Args:
        models: already on the device where they will be used.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._layers = [pair for m in models for pair in _layers(m)]
        self._grad_buffers = GradBuffers()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context that uses the faster kernels, backward passes included."""
        # An instance attribute `forward` was set by the user or by an outer context.
        patched = [(x, forward) for x, forward in self._layers if "forward" not in vars(x)]
        buffers = self._grad_buffers.active() if self._layers else nullcontext()
        try:
            for layer, forward in patched:
                layer.__dict__["forward"] = forward
            with buffers:
                yield
        finally:
            for layer, forward in patched:
                if vars(layer).get("forward") is forward:
                    del layer.__dict__["forward"]


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """The layers to patch, and their new forward."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if type(weight) is not nn.Parameter or weight.device.type != "cpu":
            continue
        if type(layer) is nn.Linear and by_onednn(weight):
            yield layer, partial(_linear, layer)
        elif type(layer) is Conv1D and by_onednn(weight):
            yield layer, partial(_conv1d, layer)
        elif type(layer) is nn.Embedding and _is_plain(layer):
            yield layer, partial(_embedding, layer)


def _is_plain(layer: nn.Embedding) -> bool:
    return layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq


def _embedding(layer: nn.Embedding, input: Tensor) -> Tensor:
    return embedding(layer.weight, input, layer.padding_idx)


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _conv1d(layer: Conv1D, x: Tensor) -> Tensor:
    return linear(x, layer.weight.T, layer.bias)
