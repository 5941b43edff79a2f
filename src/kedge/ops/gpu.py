"""Faster kernels on a GPU.

Attention of one token per row, without a copy of keys and values per query head.  RMS norms (Zhang
and Sennrich 2019) as one kernel; transformers takes seven, and more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

OTHER = ("position_bias", "softcap", "s_aux", "cache")  # options that change the result
_EPSILON = ("variance_epsilon", "eps")  # attribute names of epsilon
_standard: dict[type[nn.Module], bool] = {}


def grouped_attention(attention: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function for transformers that is faster while sampling on a GPU.

    Behind a mask, transformers up to 5.19 repeats keys and values for every query head of a group,
    for every token: most of the time of a decode step.  5.23 works like this function.
    """

    @wraps(attention)
    def grouped(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **options: Any,
    ) -> Any:
        one_token = query.is_cuda and query.shape[2] == 1 and query.shape[1] > key.shape[1]
        same_for_heads = (
            attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[1] == 1
        )
        plain = not args and not options.get("dropout")
        plain = plain and all(options.get(name) is None for name in OTHER)
        if one_token and same_for_heads and plain:
            assert attention_mask is not None
            return attend_grouped(query, key, value, attention_mask, options.get("scaling")), None
        return attention(module, query, key, value, attention_mask, *args, **options)

    return grouped


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None = None
) -> Tensor:
    """The query heads of a group attend to its keys as if they were tokens: float [b, 1, heads, v].

    Args:
        query: float [b, heads, 1, d].
        key: float [b, groups, S, d]; query head i belongs to group i // (heads / groups).
        value: float [b, groups, S, v].
        mask: bool or float [b, 1, 1, S].
        scaling: factor of the scores; None: 1 / sqrt(d).
    """
    rows, heads, _, size = query.shape
    packed = query.reshape(rows, key.shape[1], -1, size)
    states = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return states.reshape(rows, 1, heads, value.shape[-1])


def rms_norms(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model for which ``fused_forward`` is faster: RMS norms on a GPU."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if type(weight) is nn.Parameter and weight.is_cuda and is_standard(layer):
            yield layer


def is_standard(layer: nn.Module) -> bool:
    """Whether a layer computes x / sqrt(mean(x^2) + epsilon) * weight; each class is tried once.

    False for ``nn.RMSNorm``, which is fused.
    """
    kind = type(layer)
    if not kind.__name__.endswith("RMSNorm") or kind is nn.RMSNorm or _epsilon(layer) is None:
        return False
    parameters = {name: p for name, p in layer._parameters.items() if p is not None}
    if set(parameters) != {"weight"} or layer._buffers or layer._modules:
        return False
    weight = parameters["weight"]
    if weight.ndim != 1:
        return False
    if kind not in _standard:
        _standard[kind] = _agrees(layer, weight)
    return _standard[kind]


@torch.no_grad()
def _agrees(layer: nn.Module, weight: Tensor) -> bool:
    x = torch.linspace(-2, 3, 2 * len(weight), device=weight.device).view(2, -1)
    try:
        usual = type(layer).forward(layer, x)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # for example other arguments
        return False
    fused = functional.rms_norm(x, weight.shape, weight.float(), _epsilon(layer))
    return usual.shape == fused.shape and torch.allclose(usual.float(), fused, rtol=1e-3, atol=1e-3)


def _epsilon(layer: nn.Module) -> float | None:
    values = [getattr(layer, name) for name in _EPSILON if hasattr(layer, name)]
    return values[0] if values and isinstance(values[0], float) else None


def fused_forward(layer: nn.Module) -> Callable[..., Tensor]:
    """The forward of an RMS norm as one kernel, for float32 states and weights.

    Other dtypes use the layer itself, which rounds in between.
    """
    epsilon, usual = _epsilon(layer), type(layer).forward

    def forward(x: Tensor) -> Tensor:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if not x.dtype == weight.dtype == torch.float32:
            result: Tensor = usual(layer, x)
            return result
        return functional.rms_norm(x, weight.shape, weight, epsilon)

    return forward
