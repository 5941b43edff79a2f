"""Rewards of the tasks of reasoning-gym: its own score, and the tags that its prompt asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def text_of(completion: Any) -> str:
    """The words of a completion, whether text or messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def correct(completions: Sequence[Any], entry: Sequence[str], **_: Any) -> list[float]:
    """reasoning-gym's score of the text between the last answer tags, from 0 to 1."""
    scores = []
    for completion, row in zip(completions, map(json.loads, entry), strict=True):
        score = get_score_answer_fn(row["metadata"]["source_dataset"])
        scores.append(float(score(extract_answer(text_of(completion)), row)))
    return scores


def tags(completions: Sequence[Any], **_: Any) -> list[float]:
    """A quarter for each of the four tags that occurs."""
    return [sum(tag in text_of(completion) for tag in TAGS) / 4 for completion in completions]
