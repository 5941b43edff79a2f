"""A short hash of named weights that is the same on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

import torch
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
        named: names and tensors of any type and device, in any order; read one at a time.
    """
    heads, sums = [], []
    for name, tensor in named.items() if isinstance(named, Mapping) else named:
        tensor = full(tensor)  # noqa: PLW2901
        heads.append((name, f"{name} {tuple(tensor.shape)} {tensor.dtype}"))
        sums.append(_sum(tensor.detach(), _factors(tensor.device)))
    digest = hashlib.blake2b(digest_size=8)
    for (_, head), total in sorted(zip(heads, _to_host(sums), strict=True)):
        digest.update(f"{head} {total}\n".encode())
    return digest.hexdigest()


class WeightsCopy(dict[str, Tensor]):
    """Weights by name in the dtype of a rollout engine.

    Args:
        fingerprint: of the weights before they were rounded.
    """

    fingerprint = ""


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
    narrow = factors.to(torch.int32)  # keeps the low bits, which are odd
    rows = words[: len(words) // _WIDTH * _WIDTH].view(-1, _WIDTH)
    rest = torch.cat([words[rows.numel() :], left_over])
    step = _ROWS.get(tensor.device.type, _ROWS["cuda"])
    buffer = torch.empty_like(rows[:step])
    sums = []
    for part in rows.split(step):
        product = torch.mul(part, narrow, out=buffer[: len(part)])
        sums.append(product.sum(-1, dtype=torch.int32))
    sums += [
        (part * narrow[: len(part)]).sum(-1, keepdim=True, dtype=torch.int32)
        for part in rest.split(_WIDTH)
    ]
    total = torch.cat(sums).long()
    return (total * _row_factors(len(total), factors)).sum()


def _row_factors(n: int, factors: Tensor) -> Tensor:
    """Odd factors for n rows, without a period, so that swapped rows are detected."""
    index = torch.arange(n, device=factors.device)
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
