"""Weights in Ray's object store, stored once for all engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
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
        self,
        weights: Mapping[str, Tensor],
        wrap: Callable[[dict[str, Tensor]], Any] = dict,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """``ray.ObjectRef`` of ``wrap(weights on the CPU)``; the same for the same tensors.

        Floating-point weights are converted to ``dtype`` if it is given.
        """
        import ray

        with self._lock:
            key = tuple((n, x.data_ptr(), x._version) for n, x in weights.items())
            if self._left == 0 or key != self._key:
                named = {
                    n: x.detach().to("cpu", dtype if x.is_floating_point() else None)
                    for n, x in weights.items()
                }
                self._ref = ray.put(wrap(named))
                self._key, self._named = key, tuple(weights.values())
                self._left = self._readers
            self._left -= 1
            ref = self._ref
            if self._left == 0:
                self._key, self._named, self._ref = (), (), None
            return ref
