"""A few responses of an update, token by token, as files that ``kedge report`` reads.

OUTPUT_DIR/tokens/step-000012.jsonl   one response a line; lists have one entry per token
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.backends.trackers import write_whole
from kedge.config.schedule import IntervalSchedule
from kedge.engine.hooks import StepReport
from kedge.protocols import Learner
from kedge.trainers.reporting.best_effort import BestEffortWriter
from kedge.types import Experience

FOLDER = "tokens"
MOST_TOKENS = 2048  # of a response; what follows is not written
_WINDOW = 8  # tokens that a character may be spread over


class TokenLog:
    """Keeps the first rows of an update until it is over, and writes what they were and became.

    Every rank calls it, since the models may be cut over ranks; rank 0 writes its own rows.

    Args:
        root: the run's output folder.
        rows: responses of an update.
        due: whether update ``done`` (from 1) is written.
        learner: asked once more after the update, for the log-probabilities it led to.
        tokenizer: decodes.
    """

    def __init__(
        self,
        root: Path,
        *,
        rows: int,
        due: Callable[[int], bool],
        learner: Learner,
        tokenizer: Any,
    ) -> None:
        self.folder, self.rows, self.due = root / FOLDER, rows, due
        self.learner, self.tokenizer = learner, tokenizer
        self._held: Experience | None = None
        self._beside = BestEffortWriter()

    def hold(self, step: int, experience: Experience) -> None:
        """Keep the first rows that update ``step`` (0 is the first) reads."""
        self._held = None
        if self.due(step + 1):
            self._held = experience.rows(torch.arange(min(self.rows, len(experience))))

    def write(self, report: StepReport) -> Path | None:
        """Write the rows that were kept, if any, after the update; returns rank 0's file."""
        held, self._held = self._held, None
        if held is None:
            return None
        after = self.learner.forward_no_grad(held).logprobs
        if self.learner.rank:
            return None
        lines = [self._line(held, after, report, i) for i in range(len(held))]
        file = self.folder / f"step-{report.step:06d}.jsonl"
        with self._beside.writing("rows of tokens", self.folder):
            write_whole(file, "".join(lines))
            return file
        return None

    def _line(self, held: Experience, after: Tensor, report: StepReport, i: int) -> str:
        rollout, reward_output = report.rollout, report.reward_output
        length = int(held.response_mask[i].sum())
        shown = min(length, MOST_TOKENS)
        trained = held.loss_mask[i, :shown]
        per_token = {
            "logprob": held.old_logprobs,
            "after": after,
            "reference": held.ref_logprobs,
            "sampler": held.behavior_logprobs,
            "advantage": held.advantages,
            "reward": held.rewards,
            "value": held.old_values,
            "return": held.returns,
        }
        version = int(rollout.version[i])
        row: dict[str, Any] = {
            "prompt": self.tokenizer.decode(held.prompt_ids[i][held.prompt_mask[i]]),
            "group": int(rollout.prompts.group[i]),
            "score": _short(float(reward_output.scores[i])) if reward_output.valid[i] else None,
            "rewards": {n: _short(float(x[i])) for n, x in reward_output.components.items()},
            "finished": bool(rollout.terminated[i]),
            "lag": self.learner.version - 1 - version if version >= 0 else None,
            "length": length,
            "tokens": token_texts(held.ids[i, :shown].tolist(), self.tokenizer),
        }
        if not trained.all():
            row["trained"] = trained.int().tolist()
        for name, values in per_token.items():
            if values is not None:
                row[name] = [_short(x) for x in values[i, :shown].tolist()]
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def token_rows(
    args: Any, when: IntervalSchedule, learner: Learner, tokenizer: Any
) -> TokenLog | None:
    """What writes rows as the config asks for; None if it asks for none."""
    if not args.output_dir or when.tokens_every is None:
        return None
    return TokenLog(
        Path(args.output_dir),
        rows=args.log_token_rows,
        due=when.writes_tokens,
        learner=learner,
        tokenizer=tokenizer,
    )


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """What each token adds to the text; together they are the text.

    A character that is spread over several tokens is given to the last of them.

    Args:
        ids: the tokens of a response.
        tokenizer: decodes.
    """
    texts: list[str] = []
    start = done = 0  # decoding begins at `start`, and what is before `done` was given out
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:done]) if done > start else ""
        now = tokenizer.decode(ids[start:end])
        open_character = now.endswith("\N{REPLACEMENT CHARACTER}") and end - done < _WINDOW
        if open_character and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, done = done, end
    return texts


def _short(x: float) -> float | None:
    """Four significant digits; None for what JSON has no name for."""
    return float(f"{x:.4g}") if math.isfinite(x) else None
