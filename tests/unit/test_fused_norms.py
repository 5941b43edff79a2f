"""RMS norms as one kernel, grouped attention without copies, and freed memory of a CPU."""

from __future__ import annotations

import platform

import pytest
import torch
from transformers.integrations import sdpa_attention
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from kedge.ops import kernels
from kedge.ops.gpu import attend_grouped, fused_forward, is_standard
from kedge.ops.kernels import Kernels
from kedge.rollout.embedded.decode import GrowingLayer
from tests import processes


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
    monkeypatch.setattr(kernels, "rms_norms", lambda model: [model])
    with Kernels([layer]).active():
        assert torch.equal(layer(x, x), expected)
        torch.testing.assert_close(layer(x), LlamaRMSNorm.forward(layer, x))


def test_layers_that_compute_something_else_stay_as_they_are() -> None:
    layers = [Gemma2RMSNorm(16), OwnRMSNorm(16), T5LayerNorm(16), torch.nn.RMSNorm(16)]
    assert not any(is_standard(layer) for layer in [*layers, torch.nn.LayerNorm(16)])


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_grouped_heads_attend_as_with_repeated_keys(scaling: float | None) -> None:
    torch.manual_seed(0)
    query, mask = torch.randn(3, 6, 1, 8).double(), torch.rand(3, 1, 1, 10) < 0.6
    mask[..., -1] = True
    key, value = torch.randn(3, 2, 10, 8).double(), torch.randn(3, 2, 10, 5).double()
    repeated = (sdpa_attention.repeat_kv(x, 3) for x in (key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, *repeated, attn_mask=mask, scale=scaling).transpose(1, 2)
    states = attend_grouped(query, key, value, mask, scaling)
    assert states.shape == (3, 1, 6, 5)
    torch.testing.assert_close(states, expected, rtol=1e-12, atol=1e-12)


def test_keys_stay_float32_on_a_cpu() -> None:
    layer = GrowingLayer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys, _ = layer.update(torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4))
    assert keys.dtype == torch.float32  # attention of single tokens is faster in it there


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
FRESH = """
from pathlib import Path
import torch
from kedge.ext.cpu.backend import CPUBackend

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

for keep in (False, True):
    CPUBackend().keep_freed_memory(keep)
    before = resident()
    blocks, pins = [], []
    for _ in range(16):
        blocks.append(torch.ones(2 << 20))
        pins.append(torch.ones(1 << 9))
    blocks.clear()
    print(resident() - before)
    pins.clear()
"""


@glibc
def test_freed_blocks_between_small_ones_are_kept_or_returned():
    done = processes.run("-c", FRESH)
    assert done.returncode == 0, done.stderr[-3000:]
    left, kept = map(int, done.stdout.split())
    assert kept > 100
    assert left < 64
