"""A short hash of named weights that is the same on every device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kedge.models.peft import VALUE_ADAPTER
from kedge.records.errors import SyncError

_CHUNK = 1 << 18  # words multiplied at a time; they fit a processor's cache


def fingerprint(named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits that change if any name, shape, type or bit of a weight changes.

    Hash of the names with a checksum per tensor: the sum of its 32-bit words modulo 2^32, each with
    an odd random weight for its position.  A change of one word always shows; one of several words
    is missed with probability 2^-32.  Integer sums do not depend on the order of addition, so
    devices agree.  Tensors are read one at a time, in any order; for a sharded one each rank sums
    its shard, so this is collective.
    """
    sums = FingerprintSums()
    for name, tensor in named.items() if isinstance(named, Mapping) else named:
        sums.add(name, tensor)
    return sums.digest()


class FingerprintSums:
    """A ``fingerprint`` to which tensors are added one by one."""

    def __init__(self) -> None:
        self._whole: dict[str, Tensor] = {}  # int64 checksums by name, shape and type
        self._shards: dict[str, Tensor] = {}  # checksums of this rank's shards of sharded tensors

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which may change or be freed afterwards."""
        tensor = tensor.detach()
        key = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        if isinstance(tensor, DTensor) and (first := _first_word(tensor)) is not None:
            self._shards[key] = checksum(tensor.to_local(), first)
        else:
            self._whole[key] = checksum(full_tensor(tensor))

    def digest(self) -> str:
        """The fingerprint.  Collective if a tensor was sharded."""
        sums: dict[str, int] = {}
        for checksums in (self._whole, self._shards):
            if checksums:
                device = next(iter(checksums.values())).device
                together = torch.stack([x.to(device) for x in checksums.values()])  # one transfer
                if checksums is self._shards:
                    dist.all_reduce(together)
                sums |= zip(checksums, together.tolist(), strict=True)
        lines = sorted(f"{key} {x % 2**32}" for key, x in sums.items())
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def checksum(tensor: Tensor, first: int = 0) -> Tensor:
    """The weighted sum of a tensor's words modulo 2^32, int64 [], on its device.

    The checksums of consecutive shards add up to that of the whole tensor, in which the words of
    this one start at position ``first``.
    """
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if len(octets) % 4 or octets.storage_offset() % 4:
        octets = nn.functional.pad(octets, (0, -len(octets) % 4))
    words, weights = octets.view(torch.int32), _weights(tensor.device)
    total = words.new_zeros(())
    begin = 0
    while begin < len(words):
        chunk, column = divmod(first + begin, _CHUNK)
        part = words[begin : begin + _CHUNK - column]
        product = part * weights[column : column + len(part)]
        # A different odd factor per chunk detects exchanged chunks.
        total += product.sum(dtype=torch.int32) * (chunk * 0x9E3779B1 % 2**30 * 2 + 1)
        begin += len(part)
    return total.long()


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd random numbers int32 [_CHUNK]."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**31), 2**31, (_CHUNK,), generator=generator, dtype=torch.int32)
    return (weights | 1).to(device)


def _first_word(x: DTensor) -> int | None:
    """Position of the first 32-bit word of this rank's shard; None if shards split words."""
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    if x.device_mesh.ndim != 1 or not x.placements[0].is_shard(0) or row_bytes % 4:
        return None
    rows = -(-x.shape[0] // x.device_mesh.size())  # length of the longest shard, as in torch.chunk
    return min(x.device_mesh.get_local_rank() * rows, x.shape[0]) * row_bytes // 4


class WeightsCopy(dict[str, Tensor]):
    """Weights by name for one weight sync."""

    fingerprint = ""  # hash of the unrounded weights; empty: compute it from this copy
    device: torch.device | None = None  # device of the original weights
    stored: Any = None  # result of an engine's ``stage_weights``
    expected: Any = None  # values that vLLM must report


def full_tensor(x: Tensor) -> Tensor:
    """Gather a possibly sharded tensor.  Collective: every rank must call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def policy_weights(model: nn.Module) -> dict[str, Tensor]:
    """The policy's trainable weights by name, not copied; all if none is trainable."""
    named = {n: p for n, p in model.named_parameters() if VALUE_ADAPTER not in n.split(".")}
    trained = {name: p for name, p in named.items() if p.requires_grad} or named
    return {name: p.detach() for name, p in trained.items()}


def check_weights(current: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Check that there are weights, and that they fit a model with the weights ``current``."""
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
