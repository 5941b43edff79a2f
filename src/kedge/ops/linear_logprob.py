"""Log-probabilities, entropy and KL computed from hidden states without storing all logits.

The logits of N rows over a vocabulary of V are computed tile by tile; the first tiles are kept for
the backward pass, the others are computed again.  A tile is all rows by a block of the vocabulary,
so that each row of the weight (and of its gradient) is read once per pass; the softmax runs online
over the blocks (Milakov & Gimelshein 2018, arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.ops.cpu.matmul import add_outer, add_product, exp, float32_product

_NEVER = -1e30  # logit of a token that cannot be sampled; finite, to avoid inf - inf
_CPU_TILE = 1 << 20  # elements; 4 MB of float32 fits in the cache
_GPU_TILE = 1 << 26
_MIN_COLUMNS = 256
_KEPT = 1 << 25  # elements of logits kept for the backward pass; 128 MB of float32


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
    """The tokens each row could have sampled, and the temperature.

    Args:
        temperature: logits are divided by it; > 0.
        banned: (rows bool [N], token ids): these rows cannot sample these tokens.
        allowed_tokens: int64 [N, K]; the only tokens a row can sample, -1: unused slot.
    """

    temperature: float = 1.0
    banned: tuple[Tensor, tuple[int, ...]] | None = None
    allowed_tokens: Tensor | None = None

    def rows(self, part: slice) -> TokenConstraints:
        """The constraints of a slice of the rows."""
        banned = None if self.banned is None else (self.banned[0][part], self.banned[1])
        allowed = None if self.allowed_tokens is None else self.allowed_tokens[part]
        return TokenConstraints(temperature=self.temperature, banned=banned, allowed_tokens=allowed)

    def to(self, device: torch.device) -> TokenConstraints:
        """The same on a device."""
        banned = None if self.banned is None else (self.banned[0].to(device), self.banned[1])
        allowed = None if self.allowed_tokens is None else self.allowed_tokens.to(device)
        return TokenConstraints(temperature=self.temperature, banned=banned, allowed_tokens=allowed)


class _Tiles:
    """Logit tiles of one head for some rows, in a reused buffer.

    ``grad_dtype`` is that of the operands of the backward pass's products with the gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        constraints: TokenConstraints,
        tile: int,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self.grad_dtype = grad_dtype or hidden.dtype
        self.hidden, self.head, self.constraints = hidden, head, constraints
        self.width = min(head.weight.shape[0], max(_MIN_COLUMNS, tile // max(len(hidden), 1)))
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        self.buffer = hidden.new_empty(len(hidden) * self.width, dtype=self.exact)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The blocks [low, high) of the vocabulary."""
        size = self.head.weight.shape[0]
        return ((low, min(size, low + self.width)) for low in range(0, size, self.width))

    def weight(self, low: int, high: int) -> Tensor:
        return self.head.weight[low:high].to(self.hidden.dtype)

    def logits(
        self, low: int, high: int, *, slope: bool = False, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Scaled logits float32+ [N, high-low], d/d(input); if not kept, until the next call."""
        head, constraints, size = self.head, self.constraints, len(self.hidden) * (high - low)
        memory = self.buffer.new_empty(size) if keep else self.buffer[:size]
        out = memory.view(len(self.hidden), high - low)
        w = self.weight(low, high)
        bias = None if head.bias is None else head.bias[low:high].to(w.dtype)
        z = float32_product(self.hidden, w, bias, room=out)
        derivative = None
        if head.softcap is not None:
            z.mul_(head.scale / head.softcap).tanh_()
            derivative = (1 - z * z) * (head.scale / constraints.temperature) if slope else None
            z.mul_(head.softcap / constraints.temperature)
        elif head.scale != constraints.temperature:
            z.mul_(head.scale / constraints.temperature)
        return self._restrict(z, low, high), derivative

    def _restrict(self, z: Tensor, low: int, high: int) -> Tensor:
        if self.constraints.banned is not None:
            rows, ids = self.constraints.banned
            for token in ids:
                if low <= token < high:
                    z[:, token - low].masked_fill_(rows, _NEVER)
        if self.constraints.allowed_tokens is not None:
            columns, inside = self.columns(self.constraints.allowed_tokens, low, high)
            excluded = torch.ones(len(z), high - low + 1, dtype=torch.bool, device=z.device)
            excluded.scatter_(1, columns.masked_fill(~inside, high - low), False)
            z.masked_fill_(excluded[:, :-1], _NEVER)
        return z

    @staticmethod
    def columns(ids: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Columns within the block of ``ids`` int64 [N, K], and whether they fall into it."""
        return (ids - low).clamp(0, high - low - 1), (ids >= low) & (ids < high)


class _Online:
    """Online log-sum-exp of each row, and a weighted sum under its softmax."""

    def __init__(self, tiles: _Tiles) -> None:
        shape = (len(tiles.hidden), 1)
        self.top = tiles.hidden.new_full(shape, _NEVER, dtype=tiles.exact)
        self.sum = torch.zeros_like(self.top)
        self.weighted = torch.zeros_like(self.top)

    def shift(self, z: Tensor, *, keep: bool = False) -> Tensor:
        """Rescale the sums for a new block, and subtract the running maximum from it."""
        top = torch.maximum(self.top, z.amax(1, keepdim=True))
        rescale = (self.top - top).exp_()
        self.sum.mul_(rescale)
        self.weighted.mul_(rescale)
        self.top = top
        return z - top if keep else z.sub_(top)

    @property
    def lse(self) -> Tensor:
        return self.top + self.sum.log()


def _row_slices(n: int, tile: int) -> Iterator[slice]:
    step = max(1, tile // _MIN_COLUMNS)
    return (slice(i, min(n, i + step)) for i in range(0, n, step))


def _scan(
    tiles: _Tiles, targets: Tensor, kept: list[Tensor | None] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy, and log-sum-exp, each [n].

    Appends the logits of each block to ``kept``, or None where they would take too much memory.
    """
    online = _Online(tiles)
    chosen = torch.full_like(online.top, _NEVER)
    for low, high in tiles.blocks():
        size = sum(z.numel() for z in kept or () if z is not None) + len(targets) * (high - low)
        keep = kept is not None and size <= _KEPT
        z, _ = tiles.logits(low, high, keep=keep)
        if kept is not None:
            kept.append(z if keep else None)
        column, inside = tiles.columns(targets[:, None], low, high)
        chosen = torch.where(inside, z.gather(1, column), chosen)
        before = online.top
        z = online.shift(z, keep=keep)
        online.weighted.add_((before - online.top) * online.sum)  # z is relative to top
        e = exp(z)
        online.sum.add_(e.sum(1, keepdim=True))
        online.weighted.add_(e.mul_(z).sum(1, keepdim=True))
    entropy = online.sum.log() - online.weighted / online.sum
    lse = online.lse
    return (chosen - lse)[:, 0], entropy[:, 0], lse[:, 0]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, targets, head, constraints, tile, entropy_grad, keeps = args
        kind = hidden.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        head = head._replace(weight=weight, bias=bias)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprob, entropy, lse = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(3))
        kept: list[Tensor | None] | None = [] if keeps and head.softcap is None else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _row_slices(len(hidden), tile):
                tiles = _Tiles(hidden[part], head, constraints.rows(part), tile)
                logprob[part], entropy[part], lse[part] = _scan(tiles, targets[part], kept)
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
        grads = _Grads(
            torch.zeros_like(hidden, dtype=lse.dtype) if need_hidden else None,
            _uninitialized(weight, rows=len(hidden)) if need_weight else None,
            torch.zeros_like(bias) if need_bias else None,
        )
        in_order = iter(kept)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _row_slices(len(hidden), tile):
                tiles = _Tiles(
                    hidden[part],
                    head._replace(weight=weight, bias=bias),
                    constraints.rows(part),
                    tile,
                    low,
                )
                of = (up[0][part], up[1][part] if entropy_grad else None)
                saved = (targets[part], lse[part], entropy[part], in_order)
                _accumulate_grads(tiles, saved, of, grads.rows(part))
        grad_hidden = None if grads.hidden is None else grads.hidden.to(hidden.dtype)
        return (grad_hidden, grads.weight, grads.bias, None, None, None, None, None, None)


class _Grads(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None  # uninitialized before the first rows
    bias: Tensor | None
    first: bool = True

    def rows(self, part: slice) -> _Grads:
        hidden = None if self.hidden is None else self.hidden[part]
        return self._replace(hidden=hidden, first=part.start == 0)


def _uninitialized(weight: Tensor, *, rows: int) -> Tensor:
    """Memory for a gradient that the first of ``rows`` overwrite; zeros if there are none."""
    return torch.empty_like(weight) if rows else torch.zeros_like(weight)


def _accumulate_grads(
    tiles: _Tiles,
    saved: tuple[Tensor, Tensor, Tensor, Iterator[Tensor | None]],
    up: tuple[Tensor, Tensor | None],
    grads: _Grads,
) -> None:
    """Backward of ``_scan``: add to ``grads``, given the gradients ``up`` of its outputs.

    d log p_t / d z = onehot_t - p          d entropy / d z = -p (log p + entropy)

    ``saved``: targets, log-sum-exp, entropy, and the kept logits of the next blocks.
    """
    targets, lse, entropy, kept = saved
    factor = (
        1.0 if tiles.head.softcap is not None else tiles.head.scale / tiles.constraints.temperature
    )
    of_logprob = (up[0] * factor)[:, None]
    of_entropy = None if up[1] is None else (up[1] * factor)[:, None]
    hidden = tiles.hidden.to(tiles.grad_dtype)
    for low, high in tiles.blocks():
        z, slope = next(kept, None), None
        if z is None:
            z, slope = tiles.logits(low, high, slope=True)
            z.sub_(lse[:, None])
        else:
            z = z - lse[:, None]
        if of_entropy is None:
            d = exp(z, out=z).mul_(-of_logprob)
        else:
            d = exp(z).mul_((z + entropy[:, None]).mul_(-of_entropy).sub_(of_logprob))
        column, inside = tiles.columns(targets[:, None], low, high)
        at_target = d.gather(1, column)
        d.scatter_(1, column, torch.where(inside, at_target + of_logprob, at_target))
        if slope is not None:
            d.mul_(slope)
        small = d.to(tiles.grad_dtype)
        if grads.hidden is not None:
            add_product(grads.hidden, small, tiles.head.weight[low:high].to(tiles.grad_dtype))
        if grads.weight is not None:
            add_outer(grads.weight[low:high], small, hidden, overwrite=grads.first)
        if grads.bias is not None:
            grads.bias[low:high] += d.sum(0)


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
    entropy_grad: bool = False,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of one token per row, and the entropy of the distribution, in nats.

        z = softcap(scale (h W^T + b)) / temperature    log p = z_t - log sum_j e^{z_j}
        entropy = -sum_j p_j log p_j                    over the tokens that can be sampled

    Operands of matrix products have the dtype of ``hidden`` (under autocast the autocast dtype, on
    a CPU in the backward pass only); logits and softmax are float32 (float64 for float64).  A
    target that cannot be sampled gets about -1e30.

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
        for part in _row_slices(len(hidden), size):
            policy = _Tiles(hidden[part], head, constraints.rows(part), size)
            reference = _Tiles(ref_hidden[part], ref_head, constraints.rows(part), size)
            p, q = _Online(policy), _Online(reference)
            for low, high in policy.blocks():
                z, _ = policy.logits(low, high)
                other, _ = reference.logits(low, high)
                gap = z - other
                p.shift(z)
                e = exp(z, out=z)
                p.sum.add_(e.sum(1, keepdim=True))
                p.weighted.add_(e.mul_(gap).sum(1, keepdim=True))
                q.shift(other)
                q.sum.add_(exp(other, out=other).sum(1, keepdim=True))
            kl[part] = (p.weighted / p.sum - p.lse + q.lse)[:, 0]
    return kl
