"""Scores of the initial policy, for the win rate of later evaluations."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.backends.trackers import write_whole
from kedge.errors import CheckpointError
from kedge.trainers.reporting.best_effort import BestEffortWriter

FOLDER = "start"
logger = logging.getLogger(__name__)


class InitialPolicyScores:
    """Keeps scores of the initial policy, in memory and on disk for resumed runs.

    Args:
        root: the run's output folder; None: in memory only.
        main: whether this is rank 0, which writes.
    """

    def __init__(self, root: Path | None, *, main: bool) -> None:
        self.root, self.main = root, main
        self._kept: dict[str, Tensor | None] = {}
        self._best_effort = BestEffortWriter()

    def keep(self, name: str, scores: Tensor, rows: Sequence[dict[str, object]]) -> None:
        """Keep the scores (float64 [rows], NaN for invalid rows) under the name of the set."""
        self._kept[name] = scores
        if self.root is None or not self.main:
            return
        file = self._file(self.root, name)
        plain = [None if math.isnan(x) else x for x in scores.tolist()]
        with self._best_effort.writing("scores of the initial policy", file):
            write_whole(file, json.dumps({"scores": plain, "completions": list(rows)}))

    def scores(self, name: str, count: int) -> Tensor | None:
        """The scores of a set of ``count`` rows, from this process or an earlier one.

        None, with one warning, if the folder of a resumed run does not hold them.
        """
        if name not in self._kept:
            self._kept[name] = self._read(name)
        scores = self._kept[name]
        if scores is not None and len(scores) != count:
            raise CheckpointError(
                f"the initial policy was scored on {len(scores)} rows of {name.strip('_')!r}, got "
                f"{count} now; evaluate on the same prompts, or set eval_against_start=False"
            )
        return scores

    def _read(self, name: str) -> Tensor | None:
        file = None if self.root is None else self._file(self.root, name)
        if file is None or not file.is_file():
            if self.main:
                logger.warning(
                    "eval_against_start: the scores of the initial policy are missing%s; no win "
                    "rate is logged",
                    f" ({file} does not exist)" if file else "",
                )
            return None
        try:
            scores: list[Any] = json.loads(file.read_text(encoding="utf-8"))["scores"]
            plain = [math.nan if x is None else float(x) for x in scores]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self.main:
                logger.warning(
                    "eval_against_start: %s is damaged (%s); no win rate is logged", file, error
                )
            return None
        return torch.tensor(plain, dtype=torch.float64)

    @staticmethod
    def _file(root: Path, name: str) -> Path:
        return root / FOLDER / f"{name.strip('_')}.json"
