"""Responses as text: tables of completions, and a log of a few responses token by token.

OUTPUT_DIR/tokens/step-000012.jsonl   one response a line; lists have one entry per token
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.config.base import OnPolicyConfig
from kedge.data.encode import is_chat
from kedge.records.protocols import Hook, Learner
from kedge.records.types import Experience, RewardOutput, Rollout, StepReport
from kedge.reporting.base import BestEffortWriter, write_whole

FOLDER = "tokens"
MOST_TOKENS = 2048  # tokens written per response
MOST_LOGS = 100  # token logs per run, since they are large
_WINDOW = 8  # most tokens that form one character


class IntervalSchedule:
    """When a run shows samples and writes token rows, given the finished iterations, from 1.

    Intervals count iterations and may be fractions; None: never.
    """

    def __init__(
        self, config: OnPolicyConfig, *, iterations: int, iterations_per_epoch: float
    ) -> None:
        tables, every = config.num_sample_generations, config.logging_steps
        strategy = str(getattr(config.logging_strategy, "value", config.logging_strategy))
        every = math.ceil(iterations * every) if every < 1 else every  # below 1: a fraction
        if strategy != "steps":
            every = iterations_per_epoch if strategy == "epoch" else 0
        self.iterations = iterations
        self.sample_every = max(1, iterations // tables) if tables else None
        self.tokens_every: float | None = None
        if every and config.log_token_rows:
            self.tokens_every = max(every, 1, math.ceil(iterations / MOST_LOGS))

    def samples(self, done: int) -> bool:
        """Whether a table of sample completions is shown."""
        return _passes(done, self.sample_every)

    def writes_tokens(self, done: int) -> bool:
        """Whether token rows are written; also true after the first and the last iteration."""
        if self.tokens_every is None:
            return False
        return done in (1, self.iterations) or _passes(done, self.tokens_every)


def _passes(done: int, every: float | None) -> bool:
    """Whether iteration ``done`` reaches a multiple of the interval."""
    if every is None:
        return False
    return math.floor(done / every + 1e-9) > math.floor((done - 1) / every + 1e-9)


def completion_rows(
    samples: Iterable[tuple[Rollout, RewardOutput]], tokenizer: Any, *, limit: int | None = None
) -> list[dict[str, object]]:
    """Query, response and score of each row as text; with several reward sources, also each score.

    Special tokens are removed from the query and kept in the response, where they mark its end.
    The query of a conversation is its messages, without text from the chat template; an
    episode's is all that the policy read before its first turn.
    """
    rows = ((*sample, i) for sample in samples for i in range(len(sample[0])))
    table: list[dict[str, object]] = []
    for rollout, reward_output, i in islice(rows, limit):
        parts = reward_output.components
        scores = {n: float(part[i]) for n, part in parts.items()} if len(parts) > 1 else {}
        table.append(
            {
                "query": _query_text(rollout, i, tokenizer),
                "model response": _response_text(rollout, i, tokenizer),
                "score": float(reward_output.scores[i]) if reward_output.valid[i] else None,
                **{name: None if math.isnan(x) else x for name, x in scores.items()},
                **{name: _plain(values[i]) for name, values in reward_output.columns.items()},
            }
        )
    return table


def _query_text(rollout: Rollout, i: int, tokenizer: Any) -> str:
    """The prompt of row ``i``; conversations show messages, with roles if there are several."""
    prompts = rollout.prompts
    messages: Any = prompts.columns["prompt"][i] if "prompt" in prompts.columns else None
    # The tokens of an episode's prompt hold the first observation, its messages do not.
    if is_chat(messages) and rollout.episodes is None:
        texts = [str(message.get("content")) for message in messages]
        if len(messages) == 1:
            return texts[0]
        roles = [message["role"] for message in messages]
        return "\n".join(f"[{role}] {text}" for role, text in zip(roles, texts, strict=True))
    text: str = tokenizer.decode(prompts.ids[i][prompts.mask[i]], skip_special_tokens=True)
    return text


def _response_text(rollout: Rollout, i: int, tokenizer: Any) -> str:
    """The response of row ``i`` with special tokens; an episode has one paragraph per turn."""
    ids = rollout.ids[i][rollout.response_mask[i]]
    if rollout.episodes is None:
        text: str = tokenizer.decode(ids)
        return text
    turns = rollout.episodes.turn[i][rollout.response_mask[i]].tolist()
    parts = []
    for turn, run in groupby(zip(turns, ids.tolist(), strict=True), key=itemgetter(0)):
        speaker = f"[turn {turn + 1}]" if turn >= 0 else "[environment]"
        parts.append(f"{speaker} {tokenizer.decode([token for _, token in run]).strip()}")
    return "\n".join(parts)


def _plain(value: object) -> object:
    """Convert a value to a type that trackers and JSON support."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# -- the token log ---------------------------------------------------------------------------------


class TokenLog(Hook):
    """Writes the first rows of an iteration, with log-probabilities before and after it.

    Every rank calls it, since models may be sharded; rank 0 writes its rows, if the iteration
    (counted from 1) is ``due``.
    """

    def __init__(
        self, root: Path, *, rows: int, due: Callable[[int], bool], learner: Learner, tokenizer: Any
    ) -> None:
        self.folder, self.rows, self.due = root / FOLDER, rows, due
        self.learner, self.tokenizer = learner, tokenizer
        self._kept: Experience | None = None
        self._best_effort = BestEffortWriter()

    def on_experience(self, step: int, experience: Experience) -> None:
        """Keep the first rows of iteration ``step`` (counted from 0)."""
        self._kept = None
        if self.due(step + 1):
            self._kept = experience.rows(torch.arange(min(self.rows, len(experience))))

    def on_step_end(self, report: StepReport) -> None:
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
            "return": None
            if kept.returns is None
            else kept.returns.masked_fill(~kept.value_mask, math.nan),  # no target: null
        }
        version = int(rollout.policy_version[i])
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


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds; joining them gives the whole text.

    A character that spans several tokens is assigned to the last of them.
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
