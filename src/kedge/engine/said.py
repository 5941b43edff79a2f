"""What reward functions measured, over all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from kedge.protocols import Learner
from kedge.types import Metrics


def said_by_all(said: Mapping[str, tuple[float, float]], learner: Learner) -> dict[str, float]:
    """The mean of each name over the calls of all ranks; every rank calls this.

    Args:
        said: sum and count by name; ranks need not have the same names.
        learner: knows the ranks.
    """
    found = Metrics(said)
    if learner.ranks > 1:
        found = Metrics()
        for text in _gathered(json.dumps({k: [*v] for k, v in said.items()}), learner):
            found = found.merge(Metrics({k: (v[0], v[1]) for k, v in json.loads(text).items()}))
    return found.means()


def _gathered(text: str, learner: Learner) -> list[str]:
    """The texts of all ranks, in rank order: each adds its own row to a table of zeros."""
    own = torch.tensor(list(text.encode()), dtype=torch.float64)
    sizes = torch.zeros(learner.ranks, dtype=torch.float64)
    sizes[learner.rank] = len(own)
    widths = [int(n) for n in learner.total(sizes)]
    table = torch.zeros(learner.ranks, max(widths), dtype=torch.float64)
    table[learner.rank, : len(own)] = own
    rows = learner.total(table).int().tolist()
    return [bytes(row[:width]).decode() for row, width in zip(rows, widths, strict=True)]
