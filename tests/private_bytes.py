"""Bytes of the tensors that code allocates."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PrivateBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were allocated in this context and are held."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}  # by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                storage = x.untyped_storage()
                self._held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        """Bytes that are held."""
        self._held = {p: (ref, n) for p, (ref, n) in self._held.items() if not ref.expired()}
        return sum(n for _, n in self._held.values())
