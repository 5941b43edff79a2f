"""LoRA layers on CPUs (Hu et al. 2021, arXiv:2106.09685): y = x W^T + b + s (x A^T) B^T.

PEFT computes the adapter's part apart from the base's, scales it and adds it: three more passes
over a result as wide as the layer's, forward and backward.  Here the narrow product is added to the
result in place, and the gradients of both parts are summed by one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kedge.ops.cpu.matmul import by_onednn, outer, product

_PEFT_LINEAR = ("peft.tuners.lora.layer", "Linear")  # not imported here


class _LoraLinear(torch.autograd.Function):
    """The layer for x [m, k] with a frozen base."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, w, bias, a, b, scale = args
        low = torch.mm(x, a.T)
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, w, a, b, low)
        ctx.scale = scale
        return product(x, w, bias).addmm_(low, b.T, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Any) -> tuple[Tensor | None, ...]:
        x, w, a, b, low = ctx.saved_tensors
        g, (of_x, _, _, of_a, of_b, _) = up[0], ctx.needs_input_grad
        of_low = torch.mm(g, b).mul_(ctx.scale)
        return (
            product(g, w.T).addmm_(of_low, a) if of_x else None,
            None,
            None,
            outer(of_low, x) if of_a else None,
            outer(g, low).mul_(ctx.scale) if of_b else None,
            None,
        )


def lora_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The LoRA layers of a PEFT model that gain from ``lora_forward``."""
    if not hasattr(model, "peft_config"):
        return
    for layer in model.modules():
        kind, base = type(layer), getattr(layer, "base_layer", None)
        known = (kind.__module__, kind.__name__) == _PEFT_LINEAR
        if known and type(base) is nn.Linear and by_onednn(base.weight):
            yield layer


def lora_forward(layer: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
    """The forward of a LoRA layer; PEFT's own for all but plain LoRA in float32."""
    adapter = None if args or named else _plain_adapter(layer)
    if adapter is None or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        result: Tensor = type(layer).forward(layer, x, *args, **named)
        return result
    a, b, scale = adapter
    base, flat = layer.base_layer, x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        result = _LoraLinear.apply(flat, base.weight, base.bias, a, b, scale)
    else:
        result = base(flat).addmm_(torch.mm(flat, a.T), b.T, alpha=scale)
    return result.view(*x.shape[:-1], len(b))


def _plain_adapter(layer: Any) -> tuple[Tensor, Tensor, float] | None:
    """A, B and s of the one adapter that acts; None: leave the layer to PEFT."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged_adapters or len(names) != 1:
        return None
    (name,) = names
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    frozen = not layer.base_layer.weight.requires_grad
    plain = type(a) is nn.Linear and b.bias is None and name not in layer.lora_variant
    drops = layer.training and getattr(dropout, "p", 0) > 0
    if drops or not (frozen and plain and a.weight.dtype == b.weight.dtype == torch.float32):
        return None
    return a.weight, b.weight, layer.scaling[name]
