"""Attention for short rows and small heads: the numbers of torch's kernel, and only where asked."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kedge.backends.hf.encoder_decoder import build_parts
from kedge.ops.cpu import attention
from kedge.ops.cpu.attention import attending, short_attention
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
        with attending():
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
    "why",
    ["mask", "cache", "dtype", "size", "not causal", "an encoder", "autocast", "head", "bias"],
)
def test_whatever_does_not_fit_goes_to_torchs_kernel(why, monkeypatch):
    seen = calls(monkeypatch)
    q, k, v = heads(2, 2, 2, 5, 8, torch.bfloat16 if why == "dtype" else torch.float32)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril() if why == "mask" else None
    options = {"is_causal": False} if why == "not causal" else {"position_ids": torch.arange(5)}
    if why == "head":
        q, k, v = heads(2, 2, 2, 5, 24)
    if why == "bias":
        options["position_bias"] = torch.zeros(2, 2, 5, 5)
    if why == "cache":
        q = q[:, :, -1:]
    if why == "size":
        monkeypatch.setattr(attention, "_LARGEST_WEIGHTS", 10)
    layer = SimpleNamespace(is_causal=why != "an encoder", num_key_value_groups=1, training=False)
    with attending(), torch.autocast("cpu", enabled=why == "autocast"):
        short_attention(layer, q, k, v, mask, **options)
    assert seen == [1]


@torch.no_grad()
def same_inside(model, length=40):
    ids = torch.randint(1, 32, (2, length), generator=torch.Generator().manual_seed(0))
    want = model.eval()(input_ids=ids).logits
    with attending():
        found = model(input_ids=ids).logits
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_models_that_attend_by_their_own_rules_compute_what_they_did():
    torch.manual_seed(0)
    config = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
    same_inside(tf.FalconForCausalLM(tf.FalconConfig(num_attention_heads=2, **config)))


@pytest.mark.skipif(not hasattr(tf, "DeepseekV32Config"), reason="transformers lacks this family")
def test_a_sparse_mask_made_for_torchs_kernel_stays():
    torch.manual_seed(0)
    config = tf.DeepseekV32Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        first_k_dense_replace=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    same_inside(tf.DeepseekV32ForCausalLM(config))


def test_torchs_kernel_is_back_after_the_last_block_even_after_an_error():
    def fail():
        with attending(), attending():
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is short_attention
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert tiny_policy().config._attn_implementation == "sdpa"


def test_another_thread_attends_as_ever(monkeypatch):
    seen = calls(monkeypatch)
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=1, training=False)
    with attending(), ThreadPoolExecutor(1) as pool:
        pool.submit(short_attention, layer, *heads(2, 2, 2, 5, 8), None).result()
        assert seen == [1]
        short_attention(layer, *heads(2, 2, 2, 5, 8), None)
    assert seen == [1]


def test_a_kernel_that_somebody_registered_stays():
    def theirs(*args, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", theirs)
    try:
        with attending():
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


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
    parts, ids = build_parts(model), torch.arange(3, 11)[None]
    every = torch.ones_like(ids, dtype=torch.bool)
    packed = parts.pack(ids, every, ids, every)
    with torch.no_grad():
        want = parts.read(packed)
        with attending():
            found = parts.read(packed)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
