"""What tensors a block of code makes: the largest, and the bytes of all."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _made(out: Any, args: Any) -> Any:
    """The tensors of ``out`` that are no views of ``args``."""
    given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if torch.is_tensor(x)}
    for x in tree_leaves(out):
        if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
            yield x


class Largest(TorchDispatchMode):
    """Notes the most elements of any new storage that an operation returns; views do not count."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in _made(out, args):
            self.elements = max(self.elements, x.untyped_storage().size() // x.element_size())
        return out


class PrivateBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were allocated in this context and are held."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}  # by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in _made(result, args):
            storage = x.untyped_storage()
            self._held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        """Bytes that are held."""
        self._held = {p: (ref, n) for p, (ref, n) in self._held.items() if not ref.expired()}
        return sum(n for _, n in self._held.values())
