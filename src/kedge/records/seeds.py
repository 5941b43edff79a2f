"""Random seeds as functions of (seed, purpose, step), so that resumed runs are reproducible."""

from __future__ import annotations

import hashlib


def seed_for(base: int, purpose: str, step: int) -> int:
    """A seed in [0, 2^63) that depends only on the arguments."""
    text = f"{base}/{purpose}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
