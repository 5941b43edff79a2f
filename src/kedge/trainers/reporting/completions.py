"""Rows of the table of sample completions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from kedge.types import RewardOutput, Rollout


def completion_rows(
    samples: Iterable[tuple[Rollout, RewardOutput]], tokenizer: Any, *, limit: int | None = None
) -> list[dict[str, object]]:
    """Query, response and score of each row as text; with several reward sources, also each score.

    Special tokens are removed from the query and kept in the response, where they mark its end.

    Args:
        samples: rollouts and their rewards.
        tokenizer: decodes both.
        limit: maximum number of rows; None: all.
    """
    rows: list[dict[str, object]] = []
    for rollout, reward_output in samples:
        prompts = rollout.prompts
        for i in range(len(rollout)):
            if limit is not None and len(rows) >= limit:
                return rows
            rows.append(
                {
                    "query": tokenizer.decode(
                        prompts.ids[i][prompts.mask[i]], skip_special_tokens=True
                    ),
                    "model response": tokenizer.decode(rollout.ids[i][rollout.response_mask[i]]),
                    "score": float(reward_output.scores[i]) if reward_output.valid[i] else None,
                    **_by_source(reward_output, i),
                    **{name: shown(values[i]) for name, values in reward_output.columns.items()},
                }
            )
    return rows


def _by_source(reward_output: RewardOutput, i: int) -> dict[str, object]:
    if len(reward_output.components) < 2:
        return {}
    scores = {name: float(part[i]) for name, part in reward_output.components.items()}
    return {name: None if math.isnan(x) else x for name, x in scores.items()}


def shown(value: object) -> object:
    """Convert a value to a type that trackers and JSON support."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
