"""One token per row: query heads of a group share keys without copies of them."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations import sdpa_attention

from kedge.ops.gpu import attend_grouped
from kedge.rollout.embedded.decode import GrowingLayer


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
