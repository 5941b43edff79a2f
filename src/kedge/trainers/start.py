"""What the starting policy said to the evaluation prompts, kept for the whole run.

OUTPUT_DIR/start/eval_.json   its scores, and the completions that process 0 saw
"""

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
from kedge.config.on_policy import OnPolicyConfig
from kedge.errors import CheckpointError, ConfigError
from kedge.trainers.beside import Beside

FOLDER = "start"
logger = logging.getLogger(__name__)


def start_of(args: OnPolicyConfig, *, has_prompts: bool, main: bool) -> Start | None:
    """What ``eval_against_start`` asks for.

    Raises:
        ConfigError: there are no evaluation prompts.
    """
    if not args.eval_against_start:
        return None
    if not has_prompts:
        raise ConfigError("eval_against_start=True compares answers to an eval_dataset: give one")
    return Start(Path(args.output_dir) if args.output_dir else None, main=main)


class Start:
    """Keeps scores of the starting policy, in memory and for a run that goes on.

    Args:
        root: the run's output folder; None keeps them in memory alone.
        main: whether this process writes.
    """

    def __init__(self, root: Path | None, *, main: bool) -> None:
        self.root, self.main = root, main
        self._kept: dict[str, Tensor | None] = {}
        self._beside = Beside()

    def keep(self, name: str, scores: Tensor, rows: Sequence[dict[str, object]]) -> None:
        """Keep the scores (float64 [rows], NaN where there is none) under the set's name."""
        self._kept[name] = scores
        if self.root is None or not self.main:
            return
        file = self._file(self.root, name)
        plain = [None if math.isnan(x) else x for x in scores.tolist()]
        with self._beside.writing("the answers of the start", file):
            write_whole(file, json.dumps({"scores": plain, "completions": list(rows)}))

    def scores(self, name: str, count: int) -> Tensor | None:
        """The scores kept for a set of ``count`` rows, by this process or an earlier one.

        None, and a warning once, where a resumed run's folder does not hold them.

        Raises:
            CheckpointError: the file is of other prompts.
        """
        if name not in self._kept:
            self._kept[name] = self._read(name)
        found = self._kept[name]
        if found is not None and len(found) != count:
            raise CheckpointError(
                f"the starting policy answered {len(found)} rows of {name.strip('_')!r} and there "
                f"are {count} now; evaluate on the same prompts, or set eval_against_start=False"
            )
        return found

    def _read(self, name: str) -> Tensor | None:
        file = None if self.root is None else self._file(self.root, name)
        if file is None or not file.is_file():
            if self.main:
                logger.warning(
                    "eval_against_start: what the starting policy said is not known any more%s, so "
                    "no win rate is logged",
                    f" ({file} is missing)" if file else "",
                )
            return None
        try:
            scores: list[Any] = json.loads(file.read_text(encoding="utf-8"))["scores"]
            plain = [math.nan if x is None else float(x) for x in scores]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self.main:
                logger.warning(
                    "eval_against_start: %s is damaged (%s), so no win rate is logged", file, error
                )
            return None
        return torch.tensor(plain, dtype=torch.float64)

    @staticmethod
    def _file(root: Path, name: str) -> Path:
        return root / FOLDER / f"{name.strip('_')}.json"
