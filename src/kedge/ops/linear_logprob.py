"""Log-probabilities, entropy and KL computed from hidden states without storing all logits.

The logits of N rows over a vocabulary of V are computed tile by tile; of the first tiles, powers of
the logits are kept for the backward pass, the others are computed again.  A tile is all rows by a
block of the vocabulary, so that each row of the weight (and of its gradient) is read once per pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.ops.cpu.matmul import add_outer, add_product
from kedge.ops.logit_tiles import (
    NEVER,
    Head,
    LogitTiles,
    OnlineSoftmax,
    TokenConstraints,
    row_slices,
)

_CPU_TILE = 1 << 20  # elements; 4 MB of float32 fits in the cache
_GPU_TILE = 1 << 26
_KEPT = 1 << 25  # elements kept for the backward pass; 128 MB of float32
# Two per block: what is kept of its tile, and the running maximum that the tile is relative to.
_KeptTiles = list[Tensor | None]


def _scan(
    tiles: LogitTiles, targets: Tensor, kept: _KeptTiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target and entropy in nats, log-sum-exp in the tiles' unit, each [n].

    Appends to ``kept`` the powers of each block relative to the running maximum; or None where they
    would take too much memory.
    """
    online = OnlineSoftmax(tiles)
    chosen = torch.full_like(online.top, NEVER)
    for low, high in tiles.blocks():
        size = sum(x.numel() for x in (kept or ())[::2] if x is not None)
        keep = kept is not None and size + len(targets) * (high - low) <= _KEPT
        z, _ = tiles.logits(low, high)
        column, inside = tiles.columns(targets[:, None], low, high)
        chosen = torch.where(inside, z.gather(1, column), chosen)
        before = online.top
        z = online.shift(z)
        online.weighted.add_((before - online.top) * online.sum)  # z is relative to top
        e = tiles.power(z, out=tiles.room(high - low, buffer=None if keep else 1))
        if kept is not None:
            kept += [e, online.top] if keep else [None, None]
        online.sum.add_(e.sum(1, keepdim=True))
        online.weighted.add_(z.mul_(e).sum(1, keepdim=True))
    entropy = online.sum.log() - online.weighted / online.sum * tiles.nats
    lse = online.lse
    return ((chosen - lse) * tiles.nats)[:, 0], entropy[:, 0], lse[:, 0]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, targets, head, constraints, tile, keeps = args
        kind = hidden.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        head = head._replace(weight=weight, bias=bias)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprob, entropy, lse = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(3))
        kept: _KeptTiles | None = [] if keeps and head.softcap is None else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in row_slices(len(hidden), tile):
                tiles = LogitTiles(hidden[part], head, constraints.rows(part), tile)
                logprob[part], entropy[part], lse[part] = _scan(tiles, targets[part], kept)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, *(kept or []))
        ctx.spec = (head._replace(weight=lse, bias=None), constraints, tile, low)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *up: Any) -> tuple[Any, ...]:
        hidden, weight, bias, targets, lse, *kept = ctx.saved_tensors
        head, constraints, tile, low = ctx.spec
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grads = _Grads(
            torch.zeros_like(hidden, dtype=lse.dtype) if need_hidden else None,
            # the first rows overwrite it
            (torch.empty_like if len(hidden) else torch.zeros_like)(weight)
            if need_weight
            else None,
            torch.zeros_like(bias) if need_bias else None,
        )
        in_order = iter(kept)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in row_slices(len(hidden), tile):
                tiles = LogitTiles(
                    hidden[part],
                    head._replace(weight=weight, bias=bias),
                    constraints.rows(part),
                    tile,
                )
                saved = _Saved(targets[part], lse[part], in_order)
                _accumulate_grads(tiles, saved, up[0][part], grads.rows(part), low)
        grad_hidden = None if grads.hidden is None else grads.hidden.to(hidden.dtype)
        return (grad_hidden, grads.weight, grads.bias, None, None, None, None, None)


class _Grads(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None  # uninitialized before the first rows
    bias: Tensor | None
    first: bool = True

    def rows(self, part: slice) -> _Grads:
        hidden = None if self.hidden is None else self.hidden[part]
        return self._replace(hidden=hidden, first=part.start == 0)


class _Saved(NamedTuple):
    """Of the forward pass: of n rows, and the kept tiles of the blocks that follow."""

    targets: Tensor  # int64 [n]
    lse: Tensor  # [n], in the tiles' unit
    kept: Iterator[Tensor | None]


def _accumulate_grads(
    tiles: LogitTiles, saved: _Saved, up: Tensor, grads: _Grads, dtype: torch.dtype
) -> None:
    """Backward of ``_scan``: add to ``grads``, given the gradients ``up`` [n] of log p.

    d log p_t / d z = onehot_t - p

    ``dtype`` is that of the operands of the products with the gradient.
    """
    factor = (
        1.0 if tiles.head.softcap is not None else tiles.head.scale / tiles.constraints.temperature
    )
    of_logprob = (up * factor)[:, None]
    hidden = tiles.hidden.to(dtype)
    for low, high in tiles.blocks():
        d, slope = _grad_of_logits(tiles, (low, high), saved, of_logprob)
        column, inside = tiles.columns(saved.targets[:, None], low, high)
        at_target = d.gather(1, column)
        d.scatter_(1, column, torch.where(inside, at_target + of_logprob, at_target))
        if slope is not None:
            d.mul_(slope)
        small = d.to(dtype)
        if grads.hidden is not None:
            add_product(grads.hidden, small, tiles.head.weight[low:high].to(dtype))
        if grads.weight is not None:
            add_outer(grads.weight[low:high], small, hidden, overwrite=grads.first)
        if grads.bias is not None:
            grads.bias[low:high] += d.sum(0)


def _grad_of_logits(
    tiles: LogitTiles, block: tuple[int, int], saved: _Saved, of_logprob: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradient without the part of the targets, in a buffer, and the slope of the softcap."""
    lse = saved.lse[:, None]
    kept, top = next(saved.kept, None), next(saved.kept, None)
    if kept is not None and top is not None:
        share = tiles.power(top - lse).mul_(-of_logprob)
        return torch.mul(kept, share, out=tiles.room(block[1] - block[0], buffer=0)), None
    z, slope = tiles.logits(*block, slope=True)
    z.sub_(lse)
    return tiles.power(z, out=z).mul_(-of_logprob), slope


def _tile(hidden: Tensor, tile: int | None) -> int:
    return tile or (_CPU_TILE if hidden.device.type == "cpu" else _GPU_TILE)


def _compute_dtype(hidden: Tensor) -> Tensor:
    """Hidden states in the dtype of the product with the head."""
    kind = hidden.device.type
    if kind == "cpu" or not torch.is_autocast_enabled(kind):
        return hidden  # float32 sums of bfloat16 products are as slow as float32 products on a CPU
    return hidden.to(torch.get_autocast_dtype(kind))


def linear_logprob(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    constraints: TokenConstraints | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of one token per row, and the entropy of the distribution, in nats.

        z = softcap(scale (h W^T + b)) / temperature    log p = z_t - log sum_j e^{z_j}
        entropy = -sum_j p_j log p_j                    over the tokens that can be sampled

    Operands of matrix products have the dtype of ``hidden`` (under autocast the autocast dtype, on
    a CPU in the backward pass only); logits and softmax are float32 (float64 for float64).  A
    target that cannot be sampled gets less than -1e29.

    Args:
        hidden: float [N, H].
        head: weight float [V, H], bias float [V], ...; gradients flow to both.
        targets: int64 [N].
        constraints: temperature and tokens that each row can sample; None: all, at temperature 1.
        tile: elements of logits in memory at a time; affects only rounding.

    Returns:
        float32 [N] log-probabilities, with gradient, and float32 [N] entropies.
    """
    hidden = _compute_dtype(hidden)
    outputs: tuple[Tensor, Tensor] = _LinearLogprob.apply(
        hidden,
        head.weight,
        head.bias,
        targets,
        head,
        constraints or TokenConstraints(),
        _tile(hidden, tile),
        torch.is_grad_enabled(),
    )
    return outputs


@torch.no_grad()
def linear_kl(
    hidden: Tensor,
    head: Head,
    ref_hidden: Tensor,
    ref_head: Head,
    *,
    constraints: TokenConstraints | None = None,
    tile: int | None = None,
) -> Tensor:
    """KL(p || q) over the vocabulary per row, from hidden states of two models, without gradient.

        KL = sum_j p_j (z_j - z'_j) - log sum_j e^{z_j} + log sum_j e^{z'_j}

    Args:
        hidden: float [N, H], of the policy.
        head: head of the policy, weight float [V, H].
        ref_hidden: float [N, H'], of the reference.
        ref_head: head of the reference, weight float [V, H'].
        constraints: temperature and tokens that each row can sample, the same for both.
        tile: elements of logits in memory at a time.

    Returns:
        float32 [N], nats.
    """
    hidden, ref_hidden = _compute_dtype(hidden), _compute_dtype(ref_hidden)
    size, constraints = _tile(hidden, tile), constraints or TokenConstraints()
    kl = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
    with torch.autocast(hidden.device.type, enabled=False):
        for part in row_slices(len(hidden), size):
            policy = LogitTiles(hidden[part], head, constraints.rows(part), size)
            reference = LogitTiles(ref_hidden[part], ref_head, constraints.rows(part), size)
            p, q = OnlineSoftmax(policy), OnlineSoftmax(reference)
            for low, high in policy.blocks():
                z, _ = policy.logits(low, high)
                other, _ = reference.logits(low, high)
                gap = torch.sub(z, other, alpha=reference.nats / policy.nats)
                e = policy.power(p.shift(z), out=z)
                p.sum.add_(e.sum(1, keepdim=True))
                p.weighted.add_(e.mul_(gap).sum(1, keepdim=True))
                f = reference.power(q.shift(other), out=other)
                q.sum.add_(f.sum(1, keepdim=True))
            log_ratio = p.weighted / p.sum - p.lse
            kl[part] = (log_ratio * policy.nats + q.lse * reference.nats)[:, 0]
    return kl
