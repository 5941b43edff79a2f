"""The largest tensor that a block of code makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Notes the most elements of any new storage that an operation returns; views do not count."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if torch.is_tensor(x)}
        for x in tree_leaves(out):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                size = x.untyped_storage().size() // x.element_size()
                self.elements = max(self.elements, size)
        return out
