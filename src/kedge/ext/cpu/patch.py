"""Temporarily replaces the forward of layers by faster kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from kedge.ext.cpu import matmul
from kedge.ext.cpu.matmul import (
    Bf16Weight,
    autocasts_to_bf16,
    bf16_linear,
    by_onednn,
    by_prepacked_weights,
    linear,
    may_run_in_bf16,
)
from kedge.ext.cpu.threads import shorten_spins
from kedge.ops.gpu import fused_forward, rms_norms

Forward = Callable[..., Tensor]
_MKL_ROWS = 256  # beyond this, MKL with AVX2 is as fast as packed weights
PREPACKED_TOKENS = 16  # tokens per row from which packing weights pays off
PREPACKED_BYTES = 2 << 30  # largest packed weights of a model; larger ones stay unpacked
_SPARING_BYTES = 1 << 30  # the limit if activations are checkpointed to save memory
_FLOAT32 = torch.empty(0)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # mallopt(3) parameters in glibc


class Kernels:
    """Swaps linear layers for faster CPU kernels, and RMS norms for faster GPU kernels.

    Models must be on their final device.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        self._on_cpu = any(p.device.type == "cpu" for model in models for p in model.parameters())
        self._layers = [layer for model in models for layer in _layers(model)]
        self._low = [Bf16Weight(partial(_weight, layer)) for layer in self._layers]
        self._norms = [layer for model in models for layer in rms_norms(model)]
        modules = (module for model in models for module in model.modules())
        self._checkpoints = any(getattr(m, "gradient_checkpointing", False) for m in modules)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context that uses the faster kernels, backward passes included."""
        if self._on_cpu:
            shorten_spins()
        forwards: list[tuple[nn.Module, Forward]] = [
            (layer, _build_forward(layer, low))
            for layer, low in zip(self._layers, self._low, strict=True)
            if by_onednn(layer.weight) or may_run_in_bf16(layer.weight)
        ]
        forwards += [(layer, fused_forward(layer)) for layer in self._norms]
        with _replace_forwards(forwards):
            try:
                yield
            finally:
                for low in self._low:
                    low.forget()

    def weights_changed(self) -> None:
        """Call this after optimizer steps within ``active``; fused optimizers leave no trace."""
        for low in self._low:
            low.expire()

    @contextmanager
    def prepacked(self, rows: int) -> Iterator[None]:
        """Faster context for weights that do not change, without gradient.

        oneDNN copies weights into its own layout for each product; here that is done once, for
        products of ``rows`` rows.  Where oneDNN computes all products, results are equal.  Under
        autocast the copies are bfloat16.
        """
        low = autocasts_to_bf16()
        plain = not torch.is_autocast_enabled("cpu")
        layers = [x for x in self._layers if low or (plain and by_prepacked_weights(x.weight))]
        layers = [x for x in layers if 2 * rows * x.weight.numel() >= matmul.SMALLEST]
        weights = sum(layer.weight.numel() for layer in layers)
        if not prepacked_bytes(weights, low=low, checkpointing=self._checkpoints):
            layers = []
        with (
            _replace_forwards([(x, _build_prepacked_forward(x, rows, low=low)) for x in layers]),
            self.active(),
        ):
            yield


def prepacked_bytes(weights: int, *, low: bool, checkpointing: bool) -> int:
    """Memory that ``Kernels.prepacked`` takes for so many weights; 0 if it packs nothing.

    The rule does not ask for free memory: products with packed weights may have other last bits,
    and a run that resumes must repeat them.  ``low``: sampling uses bfloat16 (under autocast).
    """
    faster = may_run_in_bf16(_FLOAT32) if low else by_prepacked_weights(_FLOAT32)
    size = weights * (2 if low else 4)
    most = _SPARING_BYTES if checkpointing else PREPACKED_BYTES  # may exceed what training takes
    return size if faster and size <= most else 0


@contextmanager
def _replace_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Context that replaces the forward of layers."""
    # An instance attribute `forward` was set by the user or by an outer context.
    patched = [
        (layer, partial(_call_with_one_input, layer, forward))
        for layer, forward in forwards
        if "forward" not in vars(layer)
    ]
    try:
        for layer, forward in patched:
            layer.__dict__["forward"] = forward
        yield
    finally:
        for layer, forward in patched:
            if vars(layer).get("forward") is forward:
                del layer.__dict__["forward"]


def _call_with_one_input(
    layer: nn.Module, forward: Forward, *args: Tensor, **named: Tensor
) -> Tensor:
    """Call ``forward`` with the input, or the layer's own if there are more arguments."""
    if len(args) + len(named) != 1:  # a norm with more inputs
        result: Tensor = type(layer).forward(layer, *args, **named)
        return result
    (x,) = (*args, *named.values())  # x is called input in one class
    return forward(x)


def _layers(model: nn.Module) -> Iterator[nn.Linear | Conv1D]:
    """The layers to patch."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if type(layer) not in (nn.Linear, Conv1D) or type(weight) is not nn.Parameter:
            continue
        if by_prepacked_weights(weight) or may_run_in_bf16(weight):  # float32, or autocast
            yield layer  # type: ignore[misc]


def _weight(layer: nn.Linear | Conv1D) -> Tensor:
    """Float [outputs, inputs]."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def _build_forward(layer: nn.Linear | Conv1D, low: Bf16Weight) -> Forward:
    own, transposed = layer._parameters, isinstance(layer, Conv1D)
    smallest = matmul.SMALLEST / (2 * len(_weight(layer)))  # elements of x

    def forward(x: Tensor) -> Tensor:
        weight: Tensor = own["weight"].T if transposed else own["weight"]  # type: ignore[assignment,union-attr]
        if x.numel() < smallest:
            return functional.linear(x, weight, own["bias"])
        if autocasts_to_bf16():
            return bf16_linear(x, weight, low.get(), own["bias"])
        return linear(x, weight, own["bias"])

    return forward


def _build_prepacked_forward(layer: nn.Linear | Conv1D, rows: int, *, low: bool) -> Forward:
    bias: Tensor | None = layer.bias
    weight, smallest = _weight(layer).detach(), matmul.SMALLEST // (2 * layer.weight.numel())
    largest = math.inf if low or by_onednn(layer.weight) else _MKL_ROWS
    if low:
        weight, smallest = weight.to(torch.bfloat16), 0
        bias = None if bias is None else bias.to(torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    usual = _build_forward(layer, Bf16Weight(partial(_weight, layer)))

    def forward(x: Tensor) -> Tensor:
        if low and not autocasts_to_bf16():  # the model disables autocast here
            return usual(x)
        if low and x.is_floating_point():
            x = x.to(torch.bfloat16)
        few, many = x.numel() < smallest * x.shape[-1], x.numel() > largest * x.shape[-1]
        if few or many or x.dtype != packed.dtype or torch.is_grad_enabled():
            return usual(x)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return result

    return forward


def keep_freed_memory(keep: bool) -> None:
    """Keep freed memory for the next pass, or return every block of at least 4 MB at once."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 4 << 20)
        mallopt(_MMAP_MAX, 0 if keep else 65_536)
        mallopt(_TRIM_THRESHOLD, -1 if keep else 128 << 10)
