"""A short hash of named weights that is the same on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

_WIDTH = 1 << 14
_VIEW = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprint(named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits that change if any name, shape, type or bit of a weight changes.

    Each tensor is summed as integers modulo 2^64, with an odd random factor per element: a single
    changed element always changes the sum, any other change does with probability 1 - 2^-60 or so.
    Integer sums do not depend on the order of addition, so devices agree.

    Args:
        named: names and tensors of any type and device, in any order.
    """
    pairs = sorted(named.items() if isinstance(named, Mapping) else named, key=lambda x: x[0])
    digest = hashlib.blake2b(digest_size=8)
    factors: dict[torch.device, Tensor] = {}
    sums = []
    for _, tensor in pairs:
        if tensor.device not in factors:
            factors[tensor.device] = _factors().to(tensor.device)
        sums.append(_sum(tensor.detach(), factors[tensor.device]))
    for (name, tensor), total in zip(pairs, _to_host(sums), strict=True):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}\n".encode())
    return digest.hexdigest()


def policy_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that training changes, by name, not copied; all of them if none trains."""
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad} or named
    return {name: p.detach() for name, p in trained.items()}


def _factors() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-(2**63), 2**63 - 1, (_WIDTH,), generator=generator, dtype=torch.int64)
    return wide | 1


def _sum(tensor: Tensor, factors: Tensor) -> Tensor:
    """One int64 per tensor, on its device."""
    bits = tensor.contiguous().view(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits).view(-1)
    if bits.dtype is not torch.bool:
        bits = bits.view(_VIEW[bits.element_size()])
    whole = len(bits) - len(bits) % _WIDTH
    rows = (bits[:whole].view(-1, _WIDTH) * factors).sum(-1)
    rest = (bits[whole:] * factors[: len(bits) - whole]).sum(-1, keepdim=True)
    total = torch.cat([rows, rest])
    # Rows are weighted too, or exchanging two of them would go unseen.
    return (total * _row_factors(len(total), factors)).sum()


def _row_factors(n: int, factors: Tensor) -> Tensor:
    """Odd factors for n rows, without a period."""
    index = torch.arange(n, device=factors.device)
    return factors[index % _WIDTH] ^ (index // _WIDTH * 2)


def _to_host(sums: list[Tensor]) -> list[int]:
    """The sums as Python integers, with one transfer if all are on one device."""
    if len({x.device for x in sums}) == 1:
        return torch.stack(sums).tolist()
    return [int(x) for x in sums]
