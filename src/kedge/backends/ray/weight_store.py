"""Weights in Ray's object store, stored once for all engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class SharedWeights:
    """Puts weights into the object store for the first reader; drops them after the last.

    Args:
        readers: number of engines that load each set of weights.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._key: tuple[tuple[str, int, int], ...] = ()
        self._named: tuple[Tensor, ...] = ()  # kept so that their memory is not reused
        self._ref: Any = None
        self._left = 0

    def ref(
        self, weights: Mapping[str, Tensor], wrap: Callable[[dict[str, Tensor]], Any] = dict
    ) -> Any:
        """``ray.ObjectRef`` of ``wrap(weights on the CPU)``; the same for the same tensors."""
        import ray

        with self._lock:
            key = tuple((n, x.data_ptr(), x._version) for n, x in weights.items())
            if self._left == 0 or key != self._key:
                self._ref = ray.put(wrap({n: x.detach().cpu() for n, x in weights.items()}))
                self._key, self._named = key, tuple(weights.values())
                self._left = self._readers
            self._left -= 1
            ref = self._ref
            if self._left == 0:
                self._key, self._named, self._ref = (), (), None
            return ref
