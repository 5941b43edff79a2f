"""The judge protocol and its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Prefer = Literal["first", "second", "tie", "invalid"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a prompt, in the order shown to the judge."""

    prompt: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A judge's answer about a pair.

    Attributes:
        prefer: the better answer; "invalid" if the reply names none.
        reply: its text, if any.
        prompt_tokens: tokens read, as reported by the judge.
        completion_tokens: tokens generated.
        cached: whether the reply came from the cache, at no cost.
    """

    prefer: Prefer
    reply: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False


class Judge(Protocol):
    """Decides which of two answers is better."""

    name: str  # in tables

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """One answer per pair, in order.

        Raises:
            JudgeError: the judge failed or cannot be reached.
        """
        ...
