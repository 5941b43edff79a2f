"""Decides when freed memory of the C library's heap returns to the system.

By default glibc returns large blocks and the end of the heap as soon as they are free, and the next
pass of a model takes the same memory from the system again, at one page fault per 4 KB.

glibc keeps freed blocks below 32 MB in its heap.  In a forward pass with gradient the small objects
of the autograd graph settle between them, so that the next large block does not fit and the heap
grows by up to the activations of every layer, although checkpointing has freed them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of mallopt(3)
_DEFAULTS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65_536}
_changed: set[int] = set()  # parameters that are not at their defaults now
WORTHWHILE = 256 << 20  # bytes; returning memory costs the page faults of using it again


class _Info(ctypes.Structure):
    """``struct mallinfo2`` of glibc; see mallinfo(3)."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


@cache
def _glibc() -> Any:
    """The C library, if it is glibc 2.33 or later; else None."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Info
        library.malloc_trim.argtypes = [ctypes.c_size_t]
    except (AttributeError, OSError, TypeError):
        return None
    return library


def keep_free_memory() -> None:
    """Keep what is freed from now on for later use, until ``release_free_memory``."""
    if (library := _glibc()) is not None:
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)  # never
        _changed.update(_DEFAULTS)


def release_free_memory(at_least: int = WORTHWHILE) -> bool:
    """Return free memory of the heap to the system; returns whether there was enough of it.

    Ends ``keep_free_memory``.

    Args:
        at_least: bytes; less is left to the heap, which will use it again.
    """
    library = _glibc()
    if library is None:
        return False
    while _changed:
        parameter = _changed.pop()
        library.mallopt(parameter, _DEFAULTS[parameter])
    if library.mallinfo2().fordblks < at_least:
        return False
    library.malloc_trim(0)
    return True
