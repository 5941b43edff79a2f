"""Weights in Ray's object store: stored once for all engines, in the engines' dtype."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.backends.vllm.weight_payload import WeightPayload

_BUCKET = 256 << 20  # bytes of weights that are on the host at a time, besides the store


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights in the object store, which stay there as long as this exists; can be pickled.

    Args:
        buckets: each a ``ray.ObjectRef`` of a list of name, dtype, shape and bytes (numpy uint8
            [n]), or None instead of bytes for the same tensor as the one before under a new name.
    """

    buckets: tuple[Any, ...]

    @classmethod
    def put(
        cls, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> StoredWeights:
        """Store weights, tensor by tensor; floating-point ones as ``dtype`` if it is given."""
        import ray

        buckets: list[Any] = []
        bucket: list[tuple[str, torch.dtype, tuple[int, ...], Any]] = []
        size, before = 0, None
        for name, x in weights:
            host = x.detach().to("cpu", dtype if x.is_floating_point() else None).contiguous()
            octets = host.view(-1).view(torch.uint8).numpy()
            repeated = bool(bucket) and before == (x.data_ptr(), x.shape, x.dtype) and x.numel()
            bucket.append((name, host.dtype, tuple(host.shape), None if repeated else octets))
            before = x.data_ptr(), x.shape, x.dtype
            size += 0 if repeated else host.nbytes
            if size >= _BUCKET:
                buckets.append(ray.put(bucket))
                bucket, size = [], 0
        if bucket:
            buckets.append(ray.put(bucket))
        return cls(tuple(buckets))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights; views of the store's memory, which must not be written to."""
        import ray

        for ref in self.buckets:
            flat = torch.empty(0, dtype=torch.uint8)
            for name, dtype, shape, octets in ray.get(ref):
                if octets is not None:
                    with warnings.catch_warnings():
                        warnings.filterwarnings("ignore", ".*not writable")
                        flat = torch.from_numpy(octets)
                yield name, flat.view(dtype).view(shape)


class SharedWeights:
    """Stores weights for the first of several readers; forgets them after the last.

    Args:
        readers: number of engines that load each set of weights.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._key: tuple[tuple[str, int, int], ...] = ()
        self._payload = WeightPayload(())  # kept so that its memory is not reused
        self._stored: Future[StoredWeights] | None = None
        self._left = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight store")

    def store(self, payload: WeightPayload) -> StoredWeights:
        """The stored weights; the same for the same tensors."""
        return self.begin(payload).result()

    def begin(self, payload: WeightPayload) -> Future[StoredWeights]:
        """``store`` in the background, during which the weights must not change."""
        with self._lock:
            key = tuple((name, x.data_ptr(), x._version) for name, x in payload.named)
            if self._stored is None or key != self._key:
                self._stored = self._thread.submit(StoredWeights.put, payload.named, payload.dtype)
                self._key, self._payload, self._left = key, payload, self._readers
            self._left -= 1
            stored = self._stored
            if self._left == 0:
                self._key, self._payload, self._stored = (), WeightPayload(()), None
            return stored
