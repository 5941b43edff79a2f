"""Writes a few responses of an iteration token by token, for ``kedge report``.

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

from kedge.config.schedule import IntervalSchedule
from kedge.loop.updater import StepReport
from kedge.protocols import Learner
from kedge.reporting.base import BestEffortWriter, write_whole
from kedge.types import Experience

FOLDER = "tokens"
MOST_TOKENS = 2048  # tokens written per response
_WINDOW = 8  # most tokens that form one character


class TokenLog:
    """Writes the first rows of an iteration, with log-probabilities before and after it.

    Every rank calls it, since models may be sharded; rank 0 writes its rows.

    Args:
        root: the run's output folder.
        rows: responses per iteration.
        due: whether an iteration (counted from 1) is written.
        learner: computes the log-probabilities after the iteration.
        tokenizer: decodes.
    """

    def __init__(
        self, root: Path, *, rows: int, due: Callable[[int], bool], learner: Learner, tokenizer: Any
    ) -> None:
        self.folder, self.rows, self.due = root / FOLDER, rows, due
        self.learner, self.tokenizer = learner, tokenizer
        self._kept: Experience | None = None
        self._best_effort = BestEffortWriter()

    def keep_rows(self, step: int, experience: Experience) -> None:
        """Keep the first rows of iteration ``step`` (counted from 0)."""
        self._kept = None
        if self.due(step + 1):
            self._kept = experience.rows(torch.arange(min(self.rows, len(experience))))

    def write(self, report: StepReport) -> None:
        """Write the kept rows, if any, after the iteration."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        after = self.learner.forward_no_grad(kept, values=False).logprobs
        if self.learner.rank:
            return
        lines = [self._line(kept, after, report, i) for i in range(len(kept))]
        with self._best_effort.writing("token logs", self.folder):
            write_whole(self.folder / f"step-{report.step:06d}.jsonl", "".join(lines))

    def _line(self, kept: Experience, after: Tensor, report: StepReport, i: int) -> str:
        rollout, reward_output = report.rollout, report.reward_output
        length = int(kept.response_mask[i].sum())
        shown = min(length, MOST_TOKENS)
        per_token = {
            "logprob": kept.old_logprobs,
            "after": after,
            "reference": kept.ref_logprobs,
            "sampler": kept.behavior_logprobs,
            "advantage": kept.advantages,
            "reward": kept.rewards,
            "value": kept.old_values,
            "return": kept.returns,
        }
        version = int(rollout.version[i])
        row: dict[str, Any] = {
            "prompt": self.tokenizer.decode(kept.prompt_ids[i][kept.prompt_mask[i]]),
            "group": int(rollout.prompts.group[i]),
            "score": _short(float(reward_output.scores[i])) if reward_output.valid[i] else None,
            "rewards": {n: _short(float(x[i])) for n, x in reward_output.components.items()},
            "finished": bool(rollout.terminated[i]),
            "lag": self.learner.version - 1 - version if version >= 0 else None,
            "length": length,
            "tokens": token_texts(kept.ids[i, :shown].tolist(), self.tokenizer),
        }
        if rollout.episodes is not None:
            turn, rewards = rollout.episodes.turn[i], rollout.episodes.rewards[i]
            row["turn"] = turn[:shown].tolist()
            row["turn_rewards"] = [
                _short(float(rewards[turn == k].sum())) for k in range(int(turn.max()) + 1)
            ]
            metrics = rollout.episodes.columns.get("metrics")
            row["metrics"] = metrics[i] if metrics else {}
        if not kept.loss_mask[i, :shown].all():
            row["trained"] = kept.loss_mask[i, :shown].int().tolist()
        for name, values in per_token.items():
            if values is not None:
                row[name] = [_short(x) for x in values[i, :shown].tolist()]
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def build_token_log(
    args: Any, when: IntervalSchedule, learner: Learner, tokenizer: Any
) -> TokenLog | None:
    """The token log that the config enables, or None."""
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
    """The text that each token adds; joining them gives the whole text.

    A character that spans several tokens is assigned to the last of them.

    Args:
        ids: the tokens of a response.
        tokenizer: decodes.
    """
    texts: list[str] = []
    start = done = 0  # decoding begins at `start`; tokens before `done` are complete
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
    """Round to four significant digits; None for NaN and infinity."""
    return float(f"{x:.4g}") if math.isfinite(x) else None
