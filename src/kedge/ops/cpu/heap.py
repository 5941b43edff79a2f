"""Decides when freed memory of the C library's heap returns to the system.

By default glibc returns large blocks and the end of the heap as soon as they are free, and the next
pass of a model takes the same memory from the system again, at one page fault per 4 KB.  A virtual
machine may have given it to its host meanwhile: then a fault takes up to 16 instead of 0.5
microseconds.

glibc keeps freed blocks below 32 MB in its heap.  In a forward pass with gradient the small objects
of the autograd graph settle between them, so that the next large block does not fit and the heap
grows by up to the activations of every layer, although checkpointing has freed them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of mallopt(3)
_DEFAULTS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65_536}
_changed: set[int] = set()  # parameters that are not at their defaults now
_GROWTH = 1.1
_STATM = Path("/proc/self/statm")
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


class _Run:
    """What ``kept_between_iterations`` knows of the run."""

    active = False
    whole = False  # whether memory was kept in all of the iteration that ends next
    size = 0  # resident bytes at the end of the first such iteration since memory was returned


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
    _Run.whole, _Run.size = False, 0
    while _changed:
        parameter = _changed.pop()
        library.mallopt(parameter, _DEFAULTS[parameter])
    if library.mallinfo2().fordblks < at_least:
        return False
    library.malloc_trim(0)
    return True


@contextmanager
def kept_between_iterations() -> Iterator[None]:
    """Context of a run, in which what is kept stays at the end of an iteration, too.

    At the end of the context all free memory is returned.
    """
    _Run.active = True
    try:
        yield
    finally:
        _Run.active = False
        release_free_memory()


def end_iteration() -> None:
    """Return free memory to the system, unless it is kept for the next iteration.

    Within ``kept_between_iterations`` memory is returned when the process has grown by a tenth:
    blocks of other sizes, as each iteration has them, may leave gaps that nothing fits into.
    """
    library = _glibc()
    if library is None or not _changed or not _Run.active or not _STATM.exists():
        release_free_memory()
    elif not _Run.whole:
        _Run.whole = True
    else:
        resident = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if not _Run.size:
            _Run.size = resident
        elif resident > _GROWTH * _Run.size:
            library.malloc_trim(0)
            _Run.size = 0
