"""``kedge grpo``: flags to a trainer, and the run."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.cli.train import ppo
from kedge.config.grpo import GRPOConfig


def main(argv: Sequence[str]) -> None:
    """Train as the flags say."""
    ppo.main(argv, prog="kedge grpo", config=GRPOConfig)
