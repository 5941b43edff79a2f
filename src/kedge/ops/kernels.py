"""Faster kernels for the models that Kedge runs, within blocks of passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from kedge.ops.attention import use_own_attention
from kedge.ops.gpu import fused_forward, rms_norms
from kedge.ops.products import Forward, backend

PREPACKED_TOKENS = 16  # tokens per row from which preparing weights for sampling pays off


class Kernels:
    """Runs layers of models by faster kernels within a block: the backend's, fused norms on a GPU.

    Models must be on their final device.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        for model in models:
            use_own_attention(model)
        self._layers = backend().layers(models)
        self._norms = [layer for model in models for layer in rms_norms(model)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context that uses the faster kernels, backward passes included."""
        norms = [(layer, fused_forward(layer)) for layer in self._norms]
        with _replaced([*self._layers.forwards(), *norms]):
            try:
                yield
            finally:
                self._layers.forget()

    def weights_changed(self) -> None:
        """Call this after optimizer steps within ``active``; fused optimizers leave no trace."""
        self._layers.expire()

    @contextmanager
    def prepacked(self, rows: int) -> Iterator[None]:
        """Faster context for weights that do not change, without gradient, for ``rows`` rows."""
        with _replaced(self._layers.packed_forwards(rows)), self.active():
            yield


@contextmanager
def _replaced(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Context in which layers of our models have another forward, as an attribute of their own.

    A layer that has one, set by the user or by an outer context, keeps it.
    """
    chosen = [
        (layer, partial(_call_with_one_input, layer, forward))
        for layer, forward in forwards
        if "forward" not in vars(layer)
    ]
    try:
        for layer, forward in chosen:
            layer.forward = forward
        yield
    finally:
        for layer, forward in chosen:
            if vars(layer).get("forward") is forward:
                del layer.forward


def _call_with_one_input(
    layer: nn.Module, forward: Forward, *args: Tensor, **named: Tensor
) -> Tensor:
    """Call ``forward`` with the input, or the layer's own if there are more arguments."""
    if len(args) + len(named) != 1:  # a norm with more inputs
        result: Tensor = type(layer).forward(layer, *args, **named)
        return result
    (x,) = (*args, *named.values())  # x is called input in one class
    return forward(x)
