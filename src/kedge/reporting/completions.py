"""Rows of the table of sample completions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from kedge.data.encode import is_chat
from kedge.types import RewardOutput, Rollout


def completion_rows(
    samples: Iterable[tuple[Rollout, RewardOutput]], tokenizer: Any, *, limit: int | None = None
) -> list[dict[str, object]]:
    """Query, response and score of each row as text; with several reward sources, also each score.

    Special tokens are removed from the query and kept in the response, where they mark its end.
    The query of a conversation is its messages, without text from the chat template; an
    episode's is all that the policy read before its first turn.

    Args:
        samples: rollouts and their rewards.
        tokenizer: decodes both.
        limit: maximum number of rows; None: all.
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
