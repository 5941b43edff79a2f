"""Layers of models on a CPU computed by quicker code, for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kedge.ops.cpu.attention import attending, may_gain
from kedge.ops.cpu.grad_accumulation import GradBuffers, embedding
from kedge.ops.cpu.matmul import by_onednn, linear

Forward = Callable[[Tensor], Tensor]


class Kernels:
    """What some models can gain on this machine; nothing, where torch's own code is as quick.

    Args:
        models: on the device where they will be used.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        self._heads = any(may_gain(m) for m in models)
        self._layers = [pair for m in models for pair in _layers(m)]
        self._gathering = GradBuffers()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute with the quicker code inside the block, backward passes included."""
        # A forward that a layer has of its own is somebody else's, or an outer block's.
        mine = [(x, forward) for x, forward in self._layers if "forward" not in vars(x)]
        heads = attending() if self._heads else nullcontext()
        large = self._gathering.active() if self._layers else nullcontext()
        try:
            for layer, forward in mine:
                layer.__dict__["forward"] = forward
            with heads, large:
                yield
        finally:
            for layer, forward in mine:
                if vars(layer).get("forward") is forward:
                    del layer.__dict__["forward"]


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """The layers that are computed otherwise, and how."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if type(weight) is not nn.Parameter or weight.device.type != "cpu":
            continue
        if type(layer) is nn.Linear and by_onednn(weight):
            yield layer, partial(_linear, layer)
        elif type(layer) is Conv1D and by_onednn(weight):
            yield layer, partial(_conv1d, layer)
        elif type(layer) is nn.Embedding and _plain(layer):
            yield layer, partial(_embedding, layer)


def _plain(layer: nn.Embedding) -> bool:
    return layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq


def _embedding(layer: nn.Embedding, input: Tensor) -> Tensor:
    return embedding(layer.weight, input, layer.padding_idx)


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _conv1d(layer: Conv1D, x: Tensor) -> Tensor:
    return linear(x, layer.weight.T, layer.bias)
