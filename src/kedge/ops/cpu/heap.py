"""Tells the C library to keep freed memory (fewer page faults) or to return it."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # mallopt(3) parameters in glibc


def keep_freed_memory(keep: bool) -> None:
    """Keep freed memory for the next pass, or return every block of at least 4 MB at once."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 4 << 20)
        mallopt(_MMAP_MAX, 0 if keep else 65_536)
        mallopt(_TRIM_THRESHOLD, -1 if keep else 128 << 10)
