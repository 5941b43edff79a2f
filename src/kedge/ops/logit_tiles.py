"""Logits of a language model, a block of the vocabulary at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.ops.cpu.matmul import float32_product

_LN_2 = math.log(2)
NEVER = -1e30  # logit of a token that cannot be sampled; finite, to avoid inf - inf
MIN_COLUMNS = 256


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


class LogitTiles:
    """Logits of one head for some rows, a tile of all rows by a block of the vocabulary at a time.

    Where hidden states are float32 or wider, they are scaled instead of the logits, and logits are
    in bits: a softmax is then a power of two, which torch computes faster than one of e on AMD
    processors.  Elsewhere logits are in nats.

    Args:
        hidden: float [N, H].
        head: the head, weight float [V, H].
        constraints: temperature and tokens that each row can sample.
        tile: elements of a tile.
    """

    def __init__(
        self, hidden: Tensor, head: Head, constraints: TokenConstraints, tile: int
    ) -> None:
        self.hidden, self.head, self.constraints = hidden, head, constraints
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        self._in_bits = hidden.dtype == self.exact and head.softcap is None
        self.nats = _LN_2 if self._in_bits else 1.0  # in a unit of the logits
        self._scale = head.scale / constraints.temperature / self.nats  # of products
        self._width = min(head.weight.shape[0], max(MIN_COLUMNS, tile // max(len(hidden), 1)))
        self._buffers: dict[int, Tensor] = {}

    @cached_property
    def _rows(self) -> Tensor:
        """The left side of the product."""
        return self.hidden * self._scale if self._in_bits else self.hidden

    def power(self, z: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Powers of e: of the logits, or differences of logits, ``z``."""
        return torch.exp2(z, out=out) if self._in_bits else torch.exp(z, out=out)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The blocks [low, high) of the vocabulary."""
        size = self.head.weight.shape[0]
        return ((low, min(size, low + self._width)) for low in range(0, size, self._width))

    def room(self, columns: int, *, buffer: int | None) -> Tensor:
        """Uninitialized float32+ [N, columns]: a buffer, until its next use; None: new memory."""
        size = len(self.hidden) * columns
        if buffer is None:
            memory = self.hidden.new_empty(size, dtype=self.exact)
        else:
            if buffer not in self._buffers:
                largest = len(self.hidden) * self._width
                self._buffers[buffer] = self.hidden.new_empty(largest, dtype=self.exact)
            memory = self._buffers[buffer][:size]
        return memory.view(len(self.hidden), columns)

    def logits(self, low: int, high: int, *, slope: bool = False) -> tuple[Tensor, Tensor | None]:
        """Logits float32+ [N, high-low] and, with ``slope``, of a softcap d(nats)/d(product).

        They are in buffer 0.
        """
        head, temperature = self.head, self.constraints.temperature
        out = self.room(high - low, buffer=0)
        w = head.weight[low:high].to(self.hidden.dtype)
        bias = None if head.bias is None else head.bias[low:high].to(w.dtype)
        if bias is not None and self._in_bits:
            bias = bias * self._scale
        z, derivative = float32_product(self._rows, w, bias, room=out), None
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
        """Columns within the block of ``ids`` int64 [N, K], and whether they fall into it."""
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
        rescale = self._tiles.power(self.top - top)
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
