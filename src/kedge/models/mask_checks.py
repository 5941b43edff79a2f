"""Keeps transformers from reading masks, which would make the host wait in each forward pass.

transformers looks for packed sequences in position ids, and for padding in an attention mask.  Rows
here are never packed, and masks are passed only with padding: both answers are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from transformers import masking_utils

_ANSWERS = {"find_packed_sequence_indices": None, "fast_all": False}
_known: ContextVar[bool] = ContextVar("masks_are_known", default=False)


@contextmanager
def known_masks() -> Iterator[None]:
    """Context that tells transformers that rows are not packed and masks have padding."""
    token = _known.set(True)
    try:
        yield
    finally:
        _known.reset(token)


def _answer(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    @wraps(function)
    def check(*args: Any, **kwargs: Any) -> Any:
        known = not torch.compiler.is_compiling() and _known.get()
        return answer if known else function(*args, **kwargs)

    return check


for _name, _value in _ANSWERS.items():
    if hasattr(masking_utils, _name):
        setattr(masking_utils, _name, _answer(getattr(masking_utils, _name), _value))
