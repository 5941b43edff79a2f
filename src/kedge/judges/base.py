"""The judge protocol, its records, and judges that are Python functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kedge.errors import JudgeError

Prefer = Literal["first", "second", "tie", "invalid"]
Preference = Callable[[list[str], list[str], list[str]], Sequence[float | None]]
Score = Callable[[list[str], list[str]], Sequence[float | None]]


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


class FunctionJudge:
    """Wraps ``f(prompts, firsts, seconds)``, which returns how likely each first answer is better.

    1: the first is better, 0: the second, 0.5: a tie, None: no answer.

    Args:
        function: see above.
        name: in tables; default: the name of the function.
    """

    def __init__(self, function: Preference, name: str | None = None) -> None:
        self._function, self.name = function, name or _name(function)

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """One answer per pair.

        Raises:
            JudgeError: the function raised, or returned invalid values.
        """
        columns = [[getattr(p, n) for p in pairs] for n in ("prompt", "first", "second")]
        values = _call(self._function, columns, len(pairs), self.name)
        for value in values:
            if value is not None and not 0 <= value <= 1:
                raise JudgeError(
                    f"judge {self.name} must return numbers from 0 (second) to 1 (first),"
                    f" got {value!r}"
                )
        return [Answer(prefer=_preference(value, 0.5)) for value in values]


class ScoreJudge:
    """Compares the scores that ``f(prompts, answers)`` gives to each answer separately.

    Args:
        score: see above; None means no answer.
        name: for tables.
        margin: scores closer than this are a tie.
    """

    def __init__(self, score: Score, name: str | None = None, *, margin: float = 0.0) -> None:
        self._score, self._margin, self.name = score, margin, name or _name(score)

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """One answer per pair.

        Raises:
            JudgeError: the function raised, or returned invalid values.
        """
        answers = [p.first for p in pairs] + [p.second for p in pairs]
        columns = [[p.prompt for p in pairs] * 2, answers]
        scores = _call(self._score, columns, len(answers), self.name)
        return [
            Answer(prefer="invalid")
            if a is None or b is None
            else Answer(prefer=_preference(a, b, self._margin), reply=f"{a:.6g} {b:.6g}")
            for a, b in zip(scores[: len(pairs)], scores[len(pairs) :], strict=True)
        ]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _preference(value: float | None, other: float, margin: float = 0.0) -> Prefer:
    if value is None:
        return "invalid"
    if abs(value - other) <= margin:
        return "tie"
    return "first" if value > other else "second"


def _call(
    function: Callable[..., Sequence[float | None]], columns: list[list[str]], rows: int, name: str
) -> list[float | None]:
    try:
        values = [None if x is None else float(x) for x in function(*columns)]
    except Exception as error:
        raise JudgeError(f"judge {name} raised {type(error).__name__}: {error}") from error
    if len(values) != rows:
        raise JudgeError(f"judge {name} must return {rows} values, got {len(values)}")
    return [None if x is None or math.isnan(x) else x for x in values]
