"""Causal attention on CPU for short rows and small heads, for which torch's kernel is slow.

With head size 8, torch's CPU kernel takes three times as long as batched matrix products over
blocks that fit in the cache, provided that the long axis of each product is contiguous:
(V^T P^T)^T instead of P V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "sdpa"
# Options that transformers passes to every kernel; a window that has an effect is in the mask.
_HARMLESS = {
    *("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
_LARGEST_HEAD = 16
_LARGEST_WEIGHTS = 1 << 23  # elements of attention weights kept for the backward, per layer
_BLOCK = 1 << 19  # elements of attention weights worked on at a time: 2 MB
_SPAN = 36  # positions
_NEVER = -1e30
_enabled: ContextVar[bool] = ContextVar("enabled", default=False)


class _ShortAttention(torch.autograd.Function):
    """(softmax(Q K^T + causal) V)^T for groups of g query heads that share a key head.

    Q is float32 [n, L g, d], already scaled; K and V are float32 [n, L, d]; out [n, d, L g].
    Queries are processed in spans of positions: a span needs no keys after its end.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, wide, size = q.shape
        length, out = k.shape[1], q.new_empty(n, size, wide)
        spans = list(_spans(length, wide // length))
        masks = [_causal_mask(span, wide // length, q) for span in spans]
        weights = [q.new_empty(n, *mask.shape) for mask in masks]
        for part in _parts(n, wide * length):
            for span, mask, kept in zip(spans, masks, weights, strict=True):
                rows, keys = span
                w = kept[part]
                scores = torch.baddbmm(mask.expand_as(w), q[part, rows], k[part, keys].mT)
                torch.softmax(scores, -1, out=w)
                out[part, :, rows] = torch.bmm(v[part, keys].mT, w.mT)
        ctx.save_for_backward(q, k, v, out, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, *weights = ctx.saved_tensors
        (n, wide, _), length, g = q.shape, k.shape[1], up[0].contiguous()
        # d scores = weights (g V^T - sum(g out)): the difference is one product, [g, -sum] [V, 1]^T
        longer = torch.cat([g, -(g * out).sum(1, keepdim=True)], 1)
        values = torch.cat([v, v.new_ones(n, length, 1)], 2)
        of_q, of_k, of_v = torch.empty_like(g), *(torch.zeros_like(x.mT) for x in (k, v))
        for part in _parts(n, wide * length):
            for span, kept in zip(_spans(length, wide // length), weights, strict=True):
                rows, keys = span
                of_v[part, :, keys] += torch.bmm(g[part, :, rows], kept[part])
                scores = torch.bmm(longer[part, :, rows].mT, values[part, keys].mT)
                scores.mul_(kept[part])
                of_q[part, :, rows] = torch.bmm(k[part, keys].mT, scores.mT)
                of_k[part, :, keys] += torch.bmm(q[part, rows].mT, scores)
        return of_q.mT, of_k.mT, of_v.mT


def _parts(n: int, row_size: int) -> Iterator[slice]:
    step = max(1, _BLOCK // max(row_size, 1))
    return (slice(i, i + step) for i in range(0, n, step))


def _spans(length: int, group: int) -> Iterator[tuple[slice, slice]]:
    """The queries [start g, stop g) and the keys [0, stop) of each span of positions."""
    count = max(1, round(length / _SPAN))
    ends = [length * i // count for i in range(count + 1)]
    return ((slice(low * group, high * group), slice(0, high)) for low, high in pairwise(ends))


def _causal_mask(span: tuple[slice, slice], group: int, like: Tensor) -> Tensor:
    """Additive causal mask of a span: 0, and a large negative number for later keys."""
    rows, keys = span
    at = torch.arange(rows.start, rows.stop, device=like.device) // group
    later = torch.arange(keys.stop, device=like.device) > at[:, None]
    return like.new_zeros(later.shape).masked_fill_(later, _NEVER)


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
    """Attention with transformers' interface; unsupported inputs are passed to torch's kernel.

    Args:
        module: the attention layer.
        query: float [b, h, L, d].
        key: float [b, kv, L, d], with kv dividing h.
        value: float [b, kv, L, d].
        attention_mask: None: causal.
        dropout: dropout probability.
        scaling: scale of the scores; None: 1/sqrt(d).
        **options: for torch's kernel, which is used if any of them could change the result.

    Returns:
        float [b, L, h, d], and no attention weights.
    """
    causal = bool(getattr(module, "is_causal", True))
    plain = _is_plain_causal(attention_mask, dropout, options, causal)
    if not (plain and _is_supported(query, key, value)):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    rows, heads, length, size = query.shape
    shared = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    group = heads // shared
    # [b, kv, L, g, d]: heads that share a key are adjacent at each position.
    q = query.view(rows, shared, group, length, size).transpose(2, 3).mul(scale)
    q = q.reshape(rows * shared, length * group, size)
    k, v = (x.reshape(rows * shared, length, size) for x in (key, value))
    out: Tensor = _ShortAttention.apply(q, k, v)
    out = out.view(rows, shared, size, length, group).permute(0, 3, 1, 4, 2)
    return out.reshape(rows, length, heads, size), None


def _is_supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    rows, heads, length, size = query.shape
    on_cpu = query.device.type == "cpu" and query.dtype == torch.float32
    small = size <= _LARGEST_HEAD and rows * heads * length * length <= _LARGEST_WEIGHTS
    whole = key.shape[2] == length > 1 and value.shape == key.shape
    enabled = _enabled.get() and not torch.is_autocast_enabled("cpu")
    return enabled and on_cpu and small and whole


def _is_plain_causal(
    mask: Tensor | None, dropout: float, options: Mapping[str, Any], causal: bool
) -> bool:
    is_causal = options.get("is_causal")
    known = all(x is None or name in _HARMLESS for name, x in options.items())
    causal = causal if is_causal is None else bool(is_causal)
    return mask is None and not dropout and known and causal


def may_gain(model: nn.Module) -> bool:
    """Whether ``short_attention`` could apply to a model; False is certain."""
    config: Any = getattr(model, "config", None)
    size, width, heads = (
        getattr(config, name, None) for name in ("head_dim", "hidden_size", "num_attention_heads")
    )
    if not isinstance(size, int) and isinstance(width, int) and isinstance(heads, int):
        size = width // max(heads, 1)
    small = not isinstance(size, int) or size <= _LARGEST_HEAD
    return small and any(p.device.type == "cpu" for p in model.parameters())


class _Switch:
    """Registers ``short_attention`` under the name of torch's kernel while any thread uses it.

    Models keep the name of their attention implementation, which some check for.
    """

    def __init__(self) -> None:
        self._lock, self._blocks = Lock(), 0

    def on(self) -> None:
        with self._lock:
            # Another kernel under that name was registered by the user.
            if not self._blocks and ALL_ATTENTION_FUNCTIONS[_NAME] is sdpa_attention_forward:
                AttentionInterface.register(_NAME, short_attention)
            self._blocks += 1

    def off(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks and ALL_ATTENTION_FUNCTIONS[_NAME] is short_attention:
                AttentionInterface.register(_NAME, sdpa_attention_forward)


_SWITCH = _Switch()


@contextmanager
def attending() -> Iterator[None]:
    """Context that uses ``short_attention`` in this thread."""
    _SWITCH.on()
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)
        _SWITCH.off()
