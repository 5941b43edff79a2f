"""``kedge rloo``: builds a trainer from flags and runs it."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.cli.train import ppo
from kedge.config.rloo import RLOOConfig


def main(argv: Sequence[str]) -> None:
    """Train with the given flags."""
    ppo.main(argv, prog="kedge rloo", config=RLOOConfig)
