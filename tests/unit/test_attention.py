"""Attention for short rows and small heads: the numbers of torch's kernel, and only where asked."""

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kedge.backends.hf import attention
from kedge.backends.hf.attention import attending, gains, short_attention
from kedge.backends.hf.encoder_decoder import parts_of
from kedge.testing import tiny_policy


def heads(rows, queries, keys, length, size, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, length, n, size, generator=g, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for n in (queries, keys, keys)
    ]


@pytest.mark.parametrize("block", [1, 200, 1 << 19])
@pytest.mark.parametrize("span", [1, 5, 36])
@pytest.mark.parametrize("shape", [(3, 4, 2, 7, 8), (2, 4, 4, 33, 8), (5, 6, 1, 2, 16)])
def test_equals_torchs_kernel_with_gradients(shape, span, block, monkeypatch):
    monkeypatch.setattr(attention, "_SPAN", span)
    monkeypatch.setattr(attention, "_BLOCK", block)
    rows, queries, keys, length, size = shape
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=queries // keys, training=False)
    found = []
    for attend in (short_attention, sdpa_attention_forward):
        q, k, v = heads(*shape)
        out, _ = attend(layer, q, k, v, None, scaling=0.7)
        (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        found.append([out, q.grad, k.grad, v.grad])
    assert found[0][0].shape == (rows, length, queries, size)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def calls(monkeypatch):
    seen = []
    plain = attention.sdpa_attention_forward
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *a, **k: (seen.append(1), plain(*a, **k))[1]
    )
    return seen


@pytest.mark.parametrize(
    "why", ["mask", "cache", "dtype", "size", "not causal", "an encoder", "autocast"]
)
def test_whatever_does_not_fit_goes_to_torchs_kernel(why, monkeypatch):
    seen = calls(monkeypatch)
    q, k, v = heads(2, 2, 2, 5, 8, torch.bfloat16 if why == "dtype" else torch.float32)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril() if why == "mask" else None
    options = {"is_causal": False} if why == "not causal" else {}
    if why == "cache":
        q = q[:, :, -1:]
    if why == "size":
        monkeypatch.setattr(attention, "_LARGEST_WEIGHTS", 10)
    layer = SimpleNamespace(is_causal=why != "an encoder", num_key_value_groups=1, training=False)
    with torch.autocast("cpu", enabled=why == "autocast"):
        short_attention(layer, q, k, v, mask, **options)
    assert seen == [1]


def test_models_with_small_heads_gain_from_it():
    assert gains(tiny_policy(hidden_size=32, heads=4))
    assert not gains(tiny_policy(hidden_size=128, heads=4))
    eager = tiny_policy(hidden_size=32, heads=4)
    eager.set_attn_implementation("eager")
    assert not gains(eager)


def test_models_that_attend_by_their_own_rules_are_left_alone():
    config = tf.FalconConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=False
    )
    torch.manual_seed(0)
    model = tf.FalconForCausalLM(config).train()
    assert config._attn_implementation == "sdpa"
    assert not gains(model)  # it would leave out the causal mask
    assert model.training
    assert gains(tf.LlamaForCausalLM(tiny_policy().config))


def test_models_attend_as_before_after_the_block_even_after_an_error():
    model = tiny_policy()

    def fail():
        with attending([model]):
            assert model.config._attn_implementation == attention.NAME
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert model.config._attn_implementation == "sdpa"


def test_an_encoder_goes_on_looking_both_ways():
    config = tf.BartConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        init_std=0.5,
    )
    torch.manual_seed(0)
    model = tf.BartForConditionalGeneration(config).eval()
    parts, ids = parts_of(model), torch.arange(3, 11)[None]
    every = torch.ones_like(ids, dtype=torch.bool)
    packed = parts.pack(ids, every, ids, every)
    assert gains(model)
    with torch.no_grad():
        want = parts.read(packed)
        with attending([model]):
            found = parts.read(packed)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
