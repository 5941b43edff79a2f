"""Weights in Ray's object store: stored once for all engines, in the engines' dtype."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.errors import SyncError
from kedge.models.fingerprint import WeightsCopy
from kedge.rollout.vllm.weights import buckets


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights in the object store, which stay there as long as this exists; can be pickled.

    Args:
        buckets: each a ``ray.ObjectRef`` of a list of name, dtype, shape and bytes (numpy uint8
            [n]).
    """

    buckets: tuple[Any, ...]

    @classmethod
    def put(
        cls, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> StoredWeights:
        """Store weights, a bucket at a time; floating-point ones as ``dtype`` if it is given.

        Raises:
            SyncError: the store is full.
        """
        import ray

        named = ((n, x.detach().to(dtype if x.is_floating_point() else None)) for n, x in weights)
        try:
            return cls(
                tuple(
                    ray.put([(n, x.dtype, tuple(x.shape), _octets(x)) for n, x in bucket])
                    for bucket in buckets(named)
                )
            )
        except ray.exceptions.ObjectStoreFullError as error:
            raise SyncError(
                "Ray's object store has no room for the weights of the rollout engines; the engines"
                " keep those that they have. Start Ray with a larger object_store_memory"
                f" ({str(error).splitlines()[0]})"
            ) from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights; views of the store's memory, which must not be written to."""
        import ray

        for ref in self.buckets:
            for name, dtype, shape, octets in ray.get(ref):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*not writable")
                    flat = torch.from_numpy(octets)
                yield name, flat.view(dtype).view(shape)


def _octets(x: Tensor) -> Any:
    return x.view(-1).view(torch.uint8).numpy()


def stage_weights(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> WeightsCopy:
    """Put weights into the store, a bucket at a time; return views of the stored weights."""
    stored = StoredWeights.put(weights, dtype)
    staged = WeightsCopy(stored.tensors())
    staged.stored = stored
    return staged


def store_weights(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> StoredWeights:
    """Return staged weights as stored weights, or put others into the store."""
    stored: StoredWeights | None = getattr(weights, "stored", None)
    return StoredWeights.put(weights.items(), dtype) if stored is None else stored
