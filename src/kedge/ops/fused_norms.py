"""RMS norms as one kernel on a GPU; transformers takes seven, and more in the backward pass.

Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPSILON = ("variance_epsilon", "eps")  # attribute names of epsilon
_standard: dict[type[nn.Module], bool] = {}


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
