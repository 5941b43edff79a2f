"""Causal attention on a CPU for short rows and small heads, where torch's kernel is slow.

With 8 numbers per head torch's CPU kernel takes three times as long as batched matrix products
over blocks that stay in the cache, if the long axis of each product is the one stored in a row:
(V^T P^T)^T and not P V.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kedge_short"
_LARGEST_HEAD = 16
_LARGEST_WEIGHTS = 1 << 23  # elements of attention weights kept for the backward, per layer
_BLOCK = 1 << 18  # elements of attention weights worked on at a time: 1 MB
_NEVER = -1e30


class _ShortAttention(torch.autograd.Function):
    """(softmax(Q K^T + causal) V)^T for groups of query heads that share a key head.

    Q is float32 [n, g L, d], already scaled; K and V are float32 [n, L, d]; out [n, d, g L].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, wide, size = q.shape
        length = k.shape[1]
        weights, out = q.new_empty(n, wide, length), q.new_empty(n, size, wide)
        never = torch.full((length, length), _NEVER).triu(1).repeat(wide // length, 1)
        for part in _blocks(weights):
            scores = torch.baddbmm(never.expand_as(weights[part]), q[part], k[part].mT)
            torch.softmax(scores, -1, out=weights[part])
            torch.bmm(v[part].mT, weights[part].mT, out=out[part])
        ctx.save_for_backward(q, k, v, weights, out)
        return out

    @staticmethod
    def backward(ctx: Any, *up: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights, out = ctx.saved_tensors
        g = up[0].contiguous()
        # d scores = weights (g V^T - sum(g out)): the difference is one product, [g, -sum] [V, 1]^T
        longer = torch.cat([g, -(g * out).sum(1, keepdim=True)], 1)
        values = torch.cat([v, v.new_ones(*v.shape[:2], 1)], 2)
        of_q, of_k, of_v = torch.empty_like(g), *(g.new_empty(x.mT.shape) for x in (k, v))
        for part in _blocks(weights):
            torch.bmm(g[part], weights[part], out=of_v[part])
            scores = torch.bmm(longer[part].mT, values[part].mT).mul_(weights[part])
            torch.bmm(k[part].mT, scores.mT, out=of_q[part])
            torch.bmm(q[part].mT, scores, out=of_k[part])
        return of_q.mT, of_k.mT, of_v.mT


def _blocks(weights: Tensor) -> Iterator[slice]:
    step = max(1, _BLOCK // max(weights[0].numel(), 1)) if len(weights) else 1
    return (slice(i, i + step) for i in range(0, len(weights), step))


def short_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers calls; whatever does not fit goes to torch's kernel.

    Args:
        module: the attention layer.
        query: float [b, h, L, d].
        key: float [b, kv, L, d], with kv dividing h.
        value: float [b, kv, L, d].
        attention_mask: None: causal.
        dropout: probability.
        scaling: of the scores; None: 1/sqrt(d).
        **options: for torch's kernel.

    Returns:
        float [b, L, h, d], and no attention weights.
    """
    rows, heads, length, size = query.shape
    fits = attention_mask is None and key.shape[2] == length > 1 and not dropout
    fits = fits and not torch.is_autocast_enabled(query.device.type)
    small = rows * heads * length * length <= _LARGEST_WEIGHTS and query.dtype == torch.float32
    if not (fits and small and value.shape == key.shape and options.get("is_causal") is not False):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    shared = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    group = heads // shared
    q = (query * scale).reshape(rows * shared, group * length, size)
    k, v = (x.reshape(rows * shared, length, size) for x in (key, value))
    out: Tensor = _ShortAttention.apply(q, k, v)
    out = out.view(rows, shared, size, group, length).permute(0, 4, 1, 3, 2)
    return out.reshape(rows, length, heads, size), None


def gains(model: nn.Module) -> bool:
    """Whether a model on a CPU has heads so small that ``short_attention`` is faster."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return False
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return 0 < size <= _LARGEST_HEAD and next(model.parameters()).device.type == "cpu"


@contextmanager
def attending(models: list[nn.Module]) -> Iterator[None]:
    """Let these models attend with ``short_attention`` for the length of the block."""
    AttentionInterface.register(NAME, short_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    with ExitStack() as stack:
        for model in models:
            config: Any = model.config
            stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = NAME
        yield
