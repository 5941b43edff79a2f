"""The backend of ``kedge.ops`` on CPUs: faster forwards of linear layers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from kedge.ext.cpu import matmul
from kedge.ext.cpu.matmul import (
    SHORT_ATTENTION,
    Bf16Weight,
    autocasts_to_bf16,
    bf16_linear,
    by_onednn,
    by_prepacked_weights,
    linear,
    may_run_in_bf16,
)
from kedge.ext.cpu.threads import shorten_spins
from kedge.ops.products import Backend, Forward, Layers

_MKL_ROWS = 256  # beyond this, MKL with AVX2 is as fast as packed weights
PREPACKED_BYTES = 2 << 30  # largest packed weights of a model; larger ones stay unpacked
_SPARING_BYTES = 1 << 30  # the limit if activations are checkpointed to save memory
_FLOAT32 = torch.empty(0)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # mallopt(3) parameters in glibc


class CPULayers(Layers):
    """Linear layers of models whose products oneDNN computes faster on this processor."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._on_cpu = any(p.device.type == "cpu" for model in models for p in model.parameters())
        self._layers = [layer for model in models for layer in _layers(model)]
        self._low = [Bf16Weight(partial(_weight, layer)) for layer in self._layers]
        modules = (module for model in models for module in model.modules())
        self._checkpoints = any(getattr(m, "gradient_checkpointing", False) for m in modules)

    def forwards(self) -> list[tuple[nn.Module, Forward]]:
        """With gradient."""
        if self._on_cpu:
            shorten_spins()
        return [
            (layer, _build_forward(layer, low))
            for layer, low in zip(self._layers, self._low, strict=True)
            if by_onednn(layer.weight) or may_run_in_bf16(layer.weight)
        ]

    def packed_forwards(self, rows: int) -> list[tuple[nn.Module, Forward]]:
        """Forwards with packed weights.

        oneDNN copies weights into its own layout for each product; here that is done once.  Where
        oneDNN computes all products, results are equal.  Under autocast the copies are bfloat16.
        """
        low = autocasts_to_bf16()
        plain = not torch.is_autocast_enabled("cpu")
        layers = [x for x in self._layers if low or (plain and by_prepacked_weights(x.weight))]
        layers = [x for x in layers if 2 * rows * x.weight.numel() >= matmul.SMALLEST]
        weights = sum(layer.weight.numel() for layer in layers)
        if not prepacked_bytes(weights, low=low, checkpointing=self._checkpoints):
            return []
        return [(x, _build_prepacked_forward(x, rows, low=low)) for x in layers]

    def forget(self) -> None:
        """Convert weights at their next use."""
        for low in self._low:
            low.forget()

    def expire(self) -> None:
        """Convert weights that train at their next use."""
        for low in self._low:
            low.expire()


class CPUBackend(Backend):
    """Products with the fastest library bundled with torch, see `matmul`."""

    @property
    def slow_bf16(self) -> str:  # type: ignore[override]
        """On x86 without instructions for bfloat16."""
        return matmul.SLOW_BF16 if matmul.emulates_bf16() else ""

    def layers(self, models: list[nn.Module]) -> Layers:
        """Linear layers and Conv1D."""
        return CPULayers(models)

    def float32_attention(self) -> int:
        """Torch's bfloat16 kernel takes up to twice as long for few keys."""
        return SHORT_ATTENTION if autocasts_to_bf16() else 0

    def keep_freed_memory(self, keep: bool) -> None:
        """Keep freed memory, or return every block of at least 4 MB at once."""
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, 4 << 20)
            mallopt(_MMAP_MAX, 0 if keep else 65_536)
            mallopt(_TRIM_THRESHOLD, -1 if keep else 128 << 10)

    def product(
        self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, out_buffer: Tensor | None = None
    ) -> Tensor:
        """By oneDNN where that is faster."""
        result = matmul.by_rule(x, w, bias)
        return super().product(x, w, bias, out_buffer=out_buffer) if result is None else result

    def outer(self, g: Tensor, x: Tensor) -> Tensor:
        """In the order of axes that oneDNN prefers."""
        return matmul.outer(g, x)

    def in_place(self, x: Tensor) -> bool:
        """Not by oneDNN."""
        return not by_onednn(x)


def prepacked_bytes(weights: int, *, low: bool, checkpointing: bool) -> int:
    """Memory that ``Kernels.prepacked`` takes for so many weights; 0 if it packs nothing.

    The decision ignores free memory on purpose: packed weights round differently, and a resumed
    run must make the same choice.  ``low``: sampling uses bfloat16 (under autocast).
    """
    faster = may_run_in_bf16(_FLOAT32) if low else by_prepacked_weights(_FLOAT32)
    size = weights * (2 if low else 4)
    most = _SPARING_BYTES if checkpointing else PREPACKED_BYTES  # may exceed what training takes
    return size if faster and size <= most else 0


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
