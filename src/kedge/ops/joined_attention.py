"""Causal attention of rows that are joined in one sequence, on CPUs.

Rows that start with the same tokens share them: the prompt of a group stands once, followed by the
responses to it.  A response attends to its prompt and to itself, in two calls of torch's flash
attention, whose results are combined by their log-sum-exp as blocks of keys are within one call
(Dao et al. 2022, arXiv:2205.14135).  Nothing is copied, and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kedge.ops.products import backend

Group = tuple[int, ...]  # tokens of a shared start, then of each continuation; (n,): one row


class _Part(NamedTuple):
    queries: slice
    keys: slice
    causal: bool


def _split_groups(groups: Sequence[Group]) -> Iterator[tuple[list[_Part], _Part | None]]:
    """For each group, split self-attending tokens from continuations that attend to a start."""
    begin = 0
    for group in groups:
        spans, at = [], begin
        for tokens in group:
            spans.append(slice(at, at + tokens))
            at += tokens
        rest = slice(spans[0].stop, at)
        across = _Part(rest, spans[0], False) if len(group) > 1 else None
        yield [_Part(span, span, True) for span in spans], across
        begin = at


class _JoinedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q, k, v, groups, scale = args
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))

        def attend(part: _Part) -> tuple[Tensor, Tensor]:
            keys, values = k[:, :, part.keys], v[:, :, part.keys]
            results: tuple[Tensor, Tensor] = flash(
                q[:, :, part.queries], keys, values, 0.0, part.causal, scale=scale
            )
            return results

        for within, across in _split_groups(groups):
            for part in within:
                out[:, :, part.queries], lse[:, :, part.queries] = attend(part)
            if across is not None:
                rest = across.queries
                of_start, lse_start = attend(across)
                both = torch.logaddexp(lse[:, :, rest], lse_start)
                out[:, :, rest] *= (lse[:, :, rest] - both).exp_()[..., None]
                out[:, :, rest] += of_start * (lse_start - both).exp_()[..., None]
                lse[:, :, rest] = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spec = (groups, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        groups, scale = ctx.spec
        (g,) = up
        grads = [torch.empty_like(x) for x in (q, k, v)]
        of_q, of_k, of_v = grads
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

        def gradients(part: _Part) -> tuple[Tensor, Tensor, Tensor]:
            # The combined output and log-sum-exp make these exact for each block of keys.
            rows, keys = part.queries, part.keys
            operands = (g[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys])
            results = (out[:, :, rows], lse[:, :, rows])
            parts: tuple[Tensor, Tensor, Tensor] = backward(
                *operands, *results, 0.0, part.causal, scale=scale
            )
            return parts

        for within, across in _split_groups(groups):
            for part in within:
                span = part.queries
                of_q[:, :, span], of_k[:, :, span], of_v[:, :, span] = gradients(part)
            if across is not None:
                rest, start = across.queries, across.keys
                for total, indices, x in zip(
                    grads, (rest, start, start), gradients(across), strict=True
                ):
                    total[:, :, indices] += x
        return of_q, of_k, of_v, None, None


def joined_attention(
    query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group], scale: float | None = None
) -> Tensor:
    """Attention of joined rows, float [1, h, T, d], with gradient.

    ``key`` and ``value`` have h' heads, of which h is a multiple: consecutive heads share keys.
    ``groups`` say how the T tokens are divided; ``scale`` multiplies scores; None: 1 / sqrt(d).
    """
    if torch.is_autocast_enabled("cpu"):
        short = max(map(sum, groups)) <= backend().float32_attention()
        dtype = torch.float32 if short else torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    heads, shared = query.shape[1], key.shape[1]
    if heads != shared:
        query = query[0].unflatten(0, (shared, heads // shared))
        key, value = (x[0, :, None].expand(-1, heads // shared, -1, -1) for x in (key, value))
    out: Tensor = _JoinedAttention.apply(query, key, value, tuple(groups), scale)
    return out.flatten(0, 1)[None] if heads != shared else out
