"""A short hash of named weights that is the same on every device."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kedge.backends.hf.peft import VALUE_ADAPTER
from kedge.errors import SyncError

_WIDTH = 1 << 14  # words per row of the table that a tensor is laid out in
_ROWS = {"cpu": 16, "cuda": 2048}  # multiplied at a time: the processor's cache; few launches


def fingerprint(named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits that change if any name, shape, type or bit of a weight changes.

    Each tensor is cut into rows of 32-bit words; a row is summed modulo 2^32 with an odd random
    factor per word, and the rows modulo 2^64 with an odd random factor per row.  A change of one
    word always shows; one of several words is missed with probability 2^-32 at most.  Integer sums
    do not depend on the order of addition, so devices agree.

    Args:
        named: names and tensors of any type and device, in any order; read one at a time.  Of a
            sharded tensor each rank sums its shard, so this is collective.
    """
    sums = FingerprintSums()
    for name, tensor in named.items() if isinstance(named, Mapping) else named:
        sums.add(name, tensor)
    return sums.digest()


class FingerprintSums:
    """A ``fingerprint`` to which tensors are added one by one."""

    def __init__(self) -> None:
        self._heads: list[str] = []
        self._sums: list[Tensor] = []
        self._shards: list[tuple[str, _ShardSums]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which may change or be freed afterwards."""
        tensor = tensor.detach()
        head = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        if isinstance(tensor, DTensor) and (first := _first_word(tensor)) is not None:
            local = tensor.to_local()
            self._shards.append((head, _sum_shard(local, first, _factors(local.device))))
            return
        tensor = full(tensor)
        self._heads.append(head)
        self._sums.append(_sum(tensor, _factors(tensor.device)))

    def digest(self) -> str:
        """The fingerprint.  Collective if a tensor was sharded."""
        totals = _to_host(self._sums) if self._sums else []
        lines = [f"{head} {x}\n" for head, x in zip(self._heads, totals, strict=True)]
        if self._shards:
            lines += _join_shards(self._shards)
        digest = hashlib.blake2b(digest_size=8)
        for line in sorted(lines, key=lambda line: line.split(" ", 1)[0]):
            digest.update(line.encode())
        return digest.hexdigest()


class WeightsCopy(dict[str, Tensor]):
    """Weights by name as they are kept for rollout engines."""

    fingerprint = ""  # of the weights before they were rounded
    device: torch.device | None = None  # of the weights themselves
    stored: Any = None  # what an engine's ``stage_weights`` made of them


def full(x: Tensor) -> Tensor:
    """The full tensor of a possibly sharded one.  Collective: every rank must call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def policy_weights(model: nn.Module) -> dict[str, Tensor]:
    """The policy's trainable weights by name, not copied; all if none is trainable."""
    named = {n: p for n, p in model.named_parameters() if VALUE_ADAPTER not in n.split(".")}
    trained = {name: p for name, p in named.items() if p.requires_grad} or named
    return {name: p.detach() for name, p in trained.items()}


@cache
def _factors(device: torch.device) -> Tensor:
    """Odd int64 [_WIDTH]."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-(2**63), 2**63 - 1, (_WIDTH,), generator=generator, dtype=torch.int64)
    return (wide | 1).to(device)


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of a tensor as int32 words, and the bytes left over (0 to 3) as int32."""
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 4:
        octets = octets.clone()
    whole = len(octets) // 4 * 4
    return octets[:whole].view(torch.int32), octets[whole:].to(torch.int32)


def _sum(tensor: Tensor, factors: Tensor) -> Tensor:
    """One int64 per tensor, on its device."""
    words, left_over = _words(tensor)
    whole = len(words) // _WIDTH * _WIDTH
    sums = _sum_rows(words[:whole].view(-1, _WIDTH), factors)
    rest = torch.cat([words[whole:], left_over])
    total = torch.cat([*sums, *(_sum_words(x, 0, factors) for x in rest.split(_WIDTH))]).long()
    return (total * _row_factors(0, len(total), factors)).sum()


def _sum_rows(rows: Tensor, factors: Tensor) -> list[Tensor]:
    """Sums of the rows of words int32 [n, _WIDTH], in parts."""
    narrow = factors.to(torch.int32)  # keeps the low bits, which are odd
    step = _ROWS.get(rows.device.type, _ROWS["cuda"])
    buffer = torch.empty_like(rows[:step])
    sums = []
    for part in rows.split(step):
        product = torch.mul(part, narrow, out=buffer[: len(part)])
        sums.append(product.sum(-1, dtype=torch.int32))
    return sums


def _sum_words(words: Tensor, column: int, factors: Tensor) -> Tensor:
    """The sum of the words of a row from ``column`` on, int32 [1]."""
    narrow = factors[column : column + len(words)].to(torch.int32)
    return (words * narrow).sum(-1, keepdim=True, dtype=torch.int32)


class _ShardSums(NamedTuple):
    """Sums of the consecutive words of a shard; the rows at its ends may be parts of rows."""

    first: int  # index of the row of ``head``
    head: Tensor  # int32 [1]; sum of the words in that row
    rows: Tensor  # int64; of all rows in between, with their factors
    last: int  # index of the row of ``tail``
    tail: Tensor  # int32 [1]


def _first_word(x: DTensor) -> int | None:
    """Index of the first 32-bit word of this rank's shard; None if shards are not of words."""
    if x.device_mesh.ndim != 1 or not x.placements[0].is_shard(0):
        return None
    per_row = math.prod(x.shape[1:]) * x.element_size()
    if per_row % 4 or (x.shape[0] and not per_row):
        return None
    chunk = -(-x.shape[0] // x.device_mesh.size())  # rows of the longest shard, as in torch.chunk
    return min(x.device_mesh.get_local_rank() * chunk, x.shape[0]) * per_row // 4


def _sum_shard(local: Tensor, first: int, factors: Tensor) -> _ShardSums:
    words, _ = _words(local)
    column = first % _WIDTH
    head = words[: min(len(words), _WIDTH - column)] if column else words[:0]
    inner = words[len(head) :]
    whole = len(inner) // _WIDTH
    row = -(-first // _WIDTH)
    sums = _sum_rows(inner[: whole * _WIDTH].view(-1, _WIDTH), factors)
    totals = torch.cat([*sums, inner.new_empty(0, dtype=torch.int32)]).long()
    return _ShardSums(
        first=first // _WIDTH,
        head=_sum_words(head, column, factors),
        rows=(totals * _row_factors(row, whole, factors)).sum(),
        last=row + whole,
        tail=_sum_words(inner[whole * _WIDTH :], 0, factors),
    )


def _join_shards(shards: Sequence[tuple[str, _ShardSums]]) -> list[str]:
    """A line of the digest for each sharded tensor, the same on all ranks.  Collective."""
    local = [
        (x.first, int(head), int(rows), x.last, int(tail))
        for (_, x), head, rows, tail in zip(
            shards,
            _to_host([x.head.long()[0] for _, x in shards]),
            _to_host([x.rows for _, x in shards]),
            _to_host([x.tail.long()[0] for _, x in shards]),
            strict=True,
        )
    ]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, local)
    lines = []
    for (head, _), *parts in zip(shards, *of_ranks, strict=True):
        ends: Counter[int] = Counter()
        for first, begin, _, last, end in parts:
            ends[first] += begin
            ends[last] += end
        total = sum(rows for _, _, rows, _, _ in parts)
        rows = torch.tensor(list(ends))
        sums = torch.tensor([_signed(x, 32) for x in ends.values()])
        factors = _factors(torch.device("cpu"))
        factor = factors[rows % _WIDTH] ^ (rows // _WIDTH * 2)
        total += int((sums * factor).sum())
        lines.append(f"{head} {_signed(total, 64)}\n")
    return lines


def _signed(x: int, bits: int) -> int:
    """``x`` modulo 2^bits as a signed integer."""
    return (x + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def _row_factors(first: int, n: int, factors: Tensor) -> Tensor:
    """Odd factors for n rows, without a period, so that swapped rows are detected."""
    index = torch.arange(first, first + n, device=factors.device)
    return factors[index % _WIDTH] ^ (index // _WIDTH * 2)


def _to_host(sums: list[Tensor]) -> list[int]:
    """The sums as Python integers, with one transfer if all are on one device."""
    if len({x.device for x in sums}) == 1:
        return torch.stack(sums).tolist()
    return [int(x) for x in sums]


def check_weights(current: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Check that weights fit a model with the weights ``current``.

    Raises:
        SyncError: there are none, or one is unknown or has a different shape.
    """
    if not weights:
        raise SyncError("a rollout engine with a copy of the policy received no weights")
    for name, new in weights.items():
        if name not in current:
            raise SyncError(
                f"weights contain {name!r}, which the rollout engine's model does not have"
            )
        if current[name].shape != new.shape:
            raise SyncError(
                f"{name} is {tuple(new.shape)} in the weights but {tuple(current[name].shape)} in"
                " the rollout engine's model; both must come from the same checkpoint"
            )
