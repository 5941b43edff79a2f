"""Weights in Ray's object store: stored once for all engines, in the engines' dtype."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.errors import SyncError
from kedge.models.fingerprint import WeightsCopy
from kedge.rollout.vllm.weight_files import StoredOnce
from kedge.rollout.vllm.weight_payload import WeightPayload, buckets


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
            SyncError: the store has no room for them.
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


class SharedWeights(StoredOnce[StoredWeights]):
    """Weights of engines in the object store; see ``StoredOnce``.

    Args:
        readers: number of engines that load each set of weights.
        dtype: in which ``stage`` stores them; None: as they are.
    """

    def __init__(self, readers: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(readers, lambda x: StoredWeights.put(x.weights.items(), x.dtype))
        self._dtype = dtype

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> WeightsCopy:
        """The weights as views of the store, in which they are put a bucket at a time."""
        stored = StoredWeights.put(weights, self._dtype)
        staged = WeightsCopy(stored.tensors())
        staged.stored = stored
        return staged

    def begin(self, payload: WeightPayload) -> Future[StoredWeights]:
        """The stored weights; not in the background if they are staged."""
        if isinstance(payload.weights, WeightsCopy) and payload.weights.stored is not None:
            done: Future[StoredWeights] = Future()
            done.set_result(payload.weights.stored)
            return done
        return super().begin(payload)
