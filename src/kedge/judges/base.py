"""What a judge is asked, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Prefer = Literal["first", "second", "tie", "invalid"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a prompt, in the order in which the judge sees them."""

    prompt: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a judge said of a pair.

    Attributes:
        prefer: the better answer; "invalid" if it cannot be told from what was said.
        said: the judge's own words, if it has any.
        prompt_tokens: read for it, as far as the judge says.
        completion_tokens: written for it.
        cached: it was known from before, and cost nothing.
    """

    prefer: Prefer
    said: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False


class Judge(Protocol):
    """Says which of two answers is better."""

    @property
    def name(self) -> str:
        """For tables."""
        ...

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """One answer a pair, in order.

        Raises:
            JudgeError: it cannot be asked.
        """
        ...
