"""RMS norms as one kernel: which layers qualify, and their values and gradients."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from kedge.ops.cpu import patch
from kedge.ops.cpu.patch import Kernels
from kedge.ops.gpu import fused_forward, is_standard


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen2RMSNorm])
def test_values_and_gradients_are_those_of_the_layer(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    layer, x = kind(16, eps=1e-3), torch.randn(3, 5, 16, requires_grad=True)
    layer.weight.data.normal_()
    assert is_standard(layer)
    results = []
    for forward in (layer, fused_forward(layer)):
        y = forward(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, layer.weight])
        results.append([y, *gradients])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_other_types_round_as_the_layer_does() -> None:
    layer, x = LlamaRMSNorm(16).bfloat16(), torch.randn(3, 16).bfloat16()
    layer.weight.data.normal_()
    assert torch.equal(fused_forward(layer)(x), layer(x))


class OwnRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + 1


class WideRMSNorm(LlamaRMSNorm):
    """Takes more than its input, and may have a bias."""

    def __init__(self, size: int, *, bias: bool = False) -> None:
        super().__init__(size)
        self.bias = torch.nn.Parameter(torch.ones(size)) if bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x if residual is None else x + residual)
        return y if self.bias is None else y + self.bias


def test_a_bias_or_a_second_input_is_left_to_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = WideRMSNorm(16), torch.randn(3, 16)
    assert is_standard(layer)
    assert not is_standard(WideRMSNorm(16, bias=True))
    expected = layer(x, x)
    monkeypatch.setattr(patch, "rms_norms", lambda model: [model])
    with Kernels([layer]).active():
        assert torch.equal(layer(x, x), expected)
        torch.testing.assert_close(layer(x), LlamaRMSNorm.forward(layer, x))


def test_layers_that_compute_something_else_stay_as_they_are() -> None:
    layers = [Gemma2RMSNorm(16), OwnRMSNorm(16), T5LayerNorm(16), torch.nn.RMSNorm(16)]
    assert not any(is_standard(layer) for layer in [*layers, torch.nn.LayerNorm(16)])
