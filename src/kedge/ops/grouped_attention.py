"""Attention of one token per row on a GPU, without a copy of keys and values per query head."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

OTHER = ("position_bias", "softcap", "s_aux", "cache")  # options that change the result


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
    """The query heads of a group attend to its keys as if they were tokens.

    Args:
        query: float [b, heads, 1, d].
        key: float [b, groups, S, d]; query head i belongs to group i // (heads / groups).
        value: float [b, groups, S, v].
        mask: bool or float [b, 1, 1, S].
        scaling: factor of the scores; None: 1 / sqrt(d).

    Returns:
        float [b, 1, heads, v]
    """
    rows, heads, _, size = query.shape
    packed = query.reshape(rows, key.shape[1], -1, size)
    states = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return states.reshape(rows, 1, heads, value.shape[-1])
