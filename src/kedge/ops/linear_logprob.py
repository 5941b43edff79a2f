"""Log-probabilities, entropy and KL computed from hidden states without storing all logits.

The logits of N rows over a vocabulary of V are computed tile by tile; of the first tiles, powers of
the logits are kept for the backward pass, the others are computed again.  A tile is all rows by a
block of the vocabulary, so that each row of the weight (and of its gradient) is read once per pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.ops.products import backend

_LN_2 = math.log(2)
NEVER = -1e30  # logit of a banned token; finite, to avoid inf - inf
MIN_COLUMNS = 256
_CPU_TILE = 1 << 20  # elements; 4 MB of float32 fits in cache
_GPU_TILE = 1 << 26
_KEPT = 1 << 25  # elements kept for the backward pass; 128 MB of float32
# Two per block: the kept part of its tile, and the running maximum subtracted from the tile.
_KeptTiles = list[Tensor | None]


class Head(NamedTuple):
    """The map from hidden states to logits: softcap(scale (h W^T + b))."""

    weight: Tensor  # float [V, H]
    bias: Tensor | None = None  # float [V]
    scale: float = 1.0
    softcap: float | None = None  # y = c tanh(x / c), Gemma 2 (arXiv:2408.00118, sec. 2)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [..., V] of hidden states float [..., H], all at once."""
        z = (hidden @ self.weight.T.to(hidden.dtype)).float()
        z = (z if self.bias is None else z + self.bias) * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConstraints:
    """The tokens each row could have sampled, and the temperature."""

    temperature: float = 1.0  # logits are divided by it; > 0
    # rows bool [N], and token ids that these rows cannot sample
    banned: tuple[Tensor, tuple[int, ...]] | None = None
    allowed_tokens: Tensor | None = None  # int64 [N, K]; -1: unused slot

    def rows(self, part: slice) -> TokenConstraints:
        """The constraints of a slice of the rows."""
        banned = None if self.banned is None else (self.banned[0][part], self.banned[1])
        allowed = None if self.allowed_tokens is None else self.allowed_tokens[part]
        return TokenConstraints(temperature=self.temperature, banned=banned, allowed_tokens=allowed)

    def to(self, device: torch.device) -> TokenConstraints:
        """Move the constraints to a device."""
        banned = None if self.banned is None else (self.banned[0].to(device), self.banned[1])
        allowed = None if self.allowed_tokens is None else self.allowed_tokens.to(device)
        return TokenConstraints(temperature=self.temperature, banned=banned, allowed_tokens=allowed)


class LogitTiles:
    """Logits of one head, computed in tiles: all rows by a block of the vocabulary.

    If hidden states float [N, H] are float32 or wider, they are scaled instead of the logits, and
    logits are in bits: a softmax is then a power of two, which torch computes faster than one of e
    on AMD processors.  Otherwise logits are in nats.  A tile has about ``tile`` elements.
    """

    def __init__(
        self, hidden: Tensor, head: Head, constraints: TokenConstraints, tile: int
    ) -> None:
        self.hidden, self.head, self.constraints = hidden, head, constraints
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        self._in_bits = hidden.dtype == self.exact and head.softcap is None
        self.nats = _LN_2 if self._in_bits else 1.0  # nats per unit of the logits
        self._scale = head.scale / constraints.temperature / self.nats  # factor of the raw products
        self._width = min(head.weight.shape[0], max(MIN_COLUMNS, tile // max(len(hidden), 1)))
        self._buffers: dict[int, Tensor] = {}

    @cached_property
    def _rows(self) -> Tensor:
        """Hidden states as the left operand of the product."""
        return self.hidden * self._scale if self._in_bits else self.hidden

    def exp(self, z: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Exponentials of the logits, or logit differences, ``z``."""
        return torch.exp2(z, out=out) if self._in_bits else torch.exp(z, out=out)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The blocks [low, high) of the vocabulary."""
        size = self.head.weight.shape[0]
        return ((low, min(size, low + self._width)) for low in range(0, size, self._width))

    def get_buffer(self, columns: int, *, index: int | None) -> Tensor:
        """An uninitialized float32+ [N, columns]: a buffer until its next use; None: new memory."""
        size = len(self.hidden) * columns
        if index is None:
            memory = self.hidden.new_empty(size, dtype=self.exact)
        else:
            if index not in self._buffers:
                largest = len(self.hidden) * self._width
                self._buffers[index] = self.hidden.new_empty(largest, dtype=self.exact)
            memory = self._buffers[index][:size]
        return memory.view(len(self.hidden), columns)

    def logits(
        self, low: int, high: int, *, slope: bool = False, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logits float32+ [N, high-low] and, with ``slope``, of a softcap d(nats)/d(product).

        They are in buffer 0, or in new memory to ``keep`` them.
        """
        head, temperature = self.head, self.constraints.temperature
        out = self.get_buffer(high - low, index=None if keep else 0)
        w = head.weight[low:high].to(self.hidden.dtype)
        bias = None if head.bias is None else head.bias[low:high].to(w.dtype)
        if bias is not None and self._in_bits:
            bias = bias * self._scale
        z, derivative = backend().float32_product(self._rows, w, bias, out_buffer=out), None
        if head.softcap is not None:
            z.mul_(head.scale / head.softcap).tanh_()
            derivative = (1 - z * z) * (head.scale / temperature) if slope else None
            z.mul_(head.softcap / temperature)
        elif not self._in_bits and self._scale != 1:
            z.mul_(self._scale)
        return self._restrict(z, low, high), derivative

    def _restrict(self, z: Tensor, low: int, high: int) -> Tensor:
        if self.constraints.banned is not None:
            rows, ids = self.constraints.banned
            for token in ids:
                if low <= token < high:
                    z[:, token - low].masked_fill_(rows, NEVER)
        if self.constraints.allowed_tokens is not None:
            columns, inside = self.columns(self.constraints.allowed_tokens, low, high)
            excluded = torch.ones(len(z), high - low + 1, dtype=torch.bool, device=z.device)
            excluded.scatter_(1, columns.masked_fill(~inside, high - low), False)
            z.masked_fill_(excluded[:, :-1], NEVER)
        return z

    @staticmethod
    def columns(ids: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Columns of ``ids`` int64 [N, K] within the block, and whether they fall into it."""
        return (ids - low).clamp(0, high - low - 1), (ids >= low) & (ids < high)


class OnlineSoftmax:
    """Log-sum-exp of each row, and a sum weighted by its softmax, block by block.

    In the unit of the tiles; Milakov & Gimelshein 2018, arXiv:1805.02867.
    """

    def __init__(self, tiles: LogitTiles) -> None:
        shape = (len(tiles.hidden), 1)
        self._tiles = tiles
        self.top = tiles.hidden.new_full(shape, NEVER, dtype=tiles.exact)
        self.sum = torch.zeros_like(self.top)
        self.weighted = torch.zeros_like(self.top)

    def shift(self, z: Tensor) -> Tensor:
        """Rescale the sums for a new block, and subtract the running maximum from it in place."""
        top = torch.maximum(self.top, z.amax(1, keepdim=True))
        rescale = self._tiles.exp(self.top - top)
        self.sum.mul_(rescale)
        self.weighted.mul_(rescale)
        self.top = top
        return z.sub_(top)

    @property
    def lse(self) -> Tensor:
        """Float [N, 1]."""
        return self.top + self.sum.log() / self._tiles.nats


def row_slices(n: int, tile: int) -> Iterator[slice]:
    """Slices of n rows whose tiles have at least 256 columns."""
    step = max(1, tile // MIN_COLUMNS)
    return (slice(i, min(n, i + step)) for i in range(0, n, step))


def _scan(
    tiles: LogitTiles, targets: Tensor, kept: _KeptTiles | None = None, *, keep_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target and entropy in nats, log-sum-exp in the tiles' unit, each [n].

    Appends to ``kept`` the powers of each block, or with ``keep_logits`` the logits, relative to
    the running maximum; or None where they would take too much memory.
    """
    online = OnlineSoftmax(tiles)
    chosen = torch.full_like(online.top, NEVER)
    for low, high in tiles.blocks():
        size = sum(x.numel() for x in (kept or ())[::2] if x is not None)
        keep = kept is not None and size + len(targets) * (high - low) <= _KEPT
        z, _ = tiles.logits(low, high, keep=keep and keep_logits)
        column, inside = tiles.columns(targets[:, None], low, high)
        chosen = torch.where(inside, z.gather(1, column), chosen)
        before = online.top
        z = online.shift(z)
        online.weighted.add_((before - online.top) * online.sum)  # z was relative to this maximum
        buffer = tiles.get_buffer(high - low, index=None if keep and not keep_logits else 1)
        e = tiles.exp(z, out=buffer)
        if kept is not None:
            kept += [z if keep_logits else e, online.top] if keep else [None, None]
        online.sum.add_(e.sum(1, keepdim=True))
        product = e.mul_(z) if keep and keep_logits else z.mul_(e)
        online.weighted.add_(product.sum(1, keepdim=True))
    entropy = online.sum.log() - online.weighted / online.sum * tiles.nats
    lse = online.lse
    return ((chosen - lse) * tiles.nats)[:, 0], entropy[:, 0], lse[:, 0]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, targets, head, constraints, tile, entropy_grad, keeps = args
        kind = hidden.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        head = head._replace(weight=weight, bias=bias)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprob, entropy, lse = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(3))
        kept: _KeptTiles | None = [] if keeps and head.softcap is None else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in row_slices(len(hidden), tile):
                tiles = LogitTiles(hidden[part], head, constraints.rows(part), tile)
                logprob[part], entropy[part], lse[part] = _scan(
                    tiles, targets[part], kept, keep_logits=entropy_grad
                )
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, *(kept or []))
        ctx.spec = (head._replace(weight=lse, bias=None), constraints, tile, entropy_grad, low)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *up: Any) -> tuple[Any, ...]:
        hidden, weight, bias, targets, lse, entropy, *kept = ctx.saved_tensors
        head, constraints, tile, entropy_grad, low = ctx.spec
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        allocate = torch.empty_like if len(hidden) else torch.zeros_like  # the first rows overwrite
        grads = _Grads(
            torch.zeros_like(hidden, dtype=lse.dtype) if need_hidden else None,
            allocate(weight) if need_weight else None,
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
                of = (up[0][part], up[1][part] if entropy_grad else None)
                saved = _Saved(targets[part], lse[part], entropy[part], in_order)
                _accumulate_grads(tiles, saved, of, grads.rows(part), low)
        grad_hidden = None if grads.hidden is None else grads.hidden.to(hidden.dtype)
        return (grad_hidden, grads.weight, grads.bias, None, None, None, None, None, None)


class _Grads(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None  # uninitialized until the first rows are written
    bias: Tensor | None
    first: bool = True

    def rows(self, part: slice) -> _Grads:
        hidden = None if self.hidden is None else self.hidden[part]
        return self._replace(hidden=hidden, first=part.start == 0)


class _Saved(NamedTuple):
    """Values saved by the forward pass for n rows, and the kept tiles of the remaining blocks."""

    targets: Tensor  # int64 [n]; token ids
    lse: Tensor  # [n], in the tiles' unit
    entropy: Tensor  # [n], nats
    kept: Iterator[Tensor | None]


def _accumulate_grads(
    tiles: LogitTiles,
    saved: _Saved,
    up: tuple[Tensor, Tensor | None],
    grads: _Grads,
    dtype: torch.dtype,
) -> None:
    """Backward of ``_scan``: add to ``grads``, given the gradients ``up`` of its outputs.

    d log p_t / d z = onehot_t - p          d entropy / d z = -p (log p + entropy)

    ``dtype`` is that of the operands of the products with the gradient.
    """
    factor = (
        1.0 if tiles.head.softcap is not None else tiles.head.scale / tiles.constraints.temperature
    )
    of_logprob = (up[0] * factor)[:, None]
    of_entropy = None if up[1] is None else (up[1] * factor)[:, None]
    hidden = tiles.hidden.to(dtype)
    for low, high in tiles.blocks():
        d, slope = _grad_of_logits(tiles, (low, high), saved, of_logprob, of_entropy)
        column, inside = tiles.columns(saved.targets[:, None], low, high)
        at_target = d.gather(1, column)
        d.scatter_(1, column, torch.where(inside, at_target + of_logprob, at_target))
        if slope is not None:
            d.mul_(slope)
        small = d.to(dtype)
        if grads.hidden is not None:
            backend().add_product(grads.hidden, small, tiles.head.weight[low:high].to(dtype))
        if grads.weight is not None:
            backend().add_outer(grads.weight[low:high], small, hidden, overwrite=grads.first)
        if grads.bias is not None:
            grads.bias[low:high] += d.sum(0)


def _grad_of_logits(
    tiles: LogitTiles,
    block: tuple[int, int],
    saved: _Saved,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient without the targets' part, in a buffer, and the softcap's slope."""
    lse, slope = saved.lse[:, None], None
    kept, top = next(saved.kept, None), next(saved.kept, None)
    width = block[1] - block[0]
    if kept is not None and top is not None:
        if of_entropy is None:
            share = tiles.exp(top - lse).mul_(-of_logprob)
            return torch.mul(kept, share, out=tiles.get_buffer(width, index=0)), None
        z = torch.add(kept, top - lse, out=tiles.get_buffer(width, index=0))
    else:
        z, slope = tiles.logits(*block, slope=True)
        z.sub_(lse)
    if of_entropy is None:
        return tiles.exp(z, out=z).mul_(-of_logprob), slope
    p = tiles.exp(z, out=tiles.get_buffer(width, index=1))
    # -(log p + entropy) of_entropy - of_logprob; z is log p in nats
    at_zero = -saved.entropy[:, None] * of_entropy - of_logprob
    return p.mul_(torch.addcmul(at_zero, z, -of_entropy * tiles.nats, out=z)), slope


def _tile(hidden: Tensor, tile: int | None) -> int:
    return tile or (_CPU_TILE if hidden.device.type == "cpu" else _GPU_TILE)


def _compute_dtype(hidden: Tensor) -> Tensor:
    """Convert hidden states to the dtype of the product with the head."""
    kind = hidden.device.type
    if kind == "cpu" or not torch.is_autocast_enabled(kind):
        return hidden  # on CPUs, float32 sums of bfloat16 products are as slow as float32
    return hidden.to(torch.get_autocast_dtype(kind))


def linear_logprob(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    constraints: TokenConstraints | None = None,
    entropy_grad: bool = False,
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
        entropy_grad: whether the entropy is differentiable, at a small cost.
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
        entropy_grad,
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
        hidden: float [N, H]; states of the policy.
        head: head of the policy, weight float [V, H].
        ref_hidden: float [N, H']; states of the reference.
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
                e = policy.exp(p.shift(z), out=z)
                p.sum.add_(e.sum(1, keepdim=True))
                p.weighted.add_(e.mul_(gap).sum(1, keepdim=True))
                f = reference.exp(q.shift(other), out=other)
                q.sum.add_(f.sum(1, keepdim=True))
            log_ratio = p.weighted / p.sum - p.lse
            kl[part] = (log_ratio * policy.nats + q.lse * reference.nats)[:, 0]
    return kl
