"""Judges that are functions, and matches: which of two sets of answers a judge prefers."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Literal, Protocol

import numpy as np

from kedge.errors import JudgeError

Prefer = Literal["first", "second", "tie", "invalid"]
Preference = Callable[[list[str], list[str], list[str]], Sequence[float | None]]
Score = Callable[[list[str], list[str]], Sequence[float | None]]
Outcome = Literal["win", "loss", "tie", "invalid"]
RESAMPLES = 2000
_WORTH: dict[Outcome, float] = {"win": 1.0, "tie": 0.5, "loss": 0.0}


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
        reply: text of the reply, if any.
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

    name: str  # shown in tables

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
        name: shown in tables; default: the name of the function.
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
        name: shown in tables.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt of a match."""

    prompt: str
    ours: str
    theirs: str
    swapped: bool  # the judge saw theirs first
    outcome: Outcome
    answer: Answer


@dataclass(frozen=True, slots=True)
class Match:
    """All rows of a match, and their statistics."""

    judge: str
    rows: list[Row]

    def count(self, outcome: Outcome) -> int:
        """Number of rows with this outcome."""
        return sum(row.outcome == outcome for row in self.rows)

    @property
    def win_rate(self) -> float:
        """Share of wins among the valid answers; a tie counts half."""
        return fmean(self._worths())

    def interval(self, *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
        """Bootstrap interval of the win rate over prompts (Efron 1979), percentile method."""
        return interval([self._worths()], level=level, seed=seed)

    @property
    def length_controlled(self) -> float | None:
        """Length-controlled win rate: the estimate for answers of equal length.

        A logistic regression of the outcome on a constant and tanh(difference of lengths in
        characters / its standard deviation); the rate at difference 0.  This is the model of Dubois
        et al. 2024 (arXiv:2404.04475), equation 2, without its term for how hard a prompt is.
        None if the answers do not differ in length, or length alone determines the outcome.
        """
        worths = np.array(self._worths())
        gaps = np.array(
            [len(row.ours) - len(row.theirs) for row in self.rows if row.outcome != "invalid"]
        )
        if len(set(gaps.tolist())) < 2:
            return None
        constant = _logistic(np.tanh(gaps / math.sqrt((gaps**2).mean())), worths)
        return None if constant is None else 1 / (1 + math.exp(-constant))

    def summary(self) -> dict[str, float | int | str | None]:
        """All statistics, as JSON values."""
        low, high = self.interval()
        answers = [row.answer for row in self.rows]
        return {
            "judge": self.judge,
            "prompts": len(self.rows),
            "wins": self.count("win"),
            "losses": self.count("loss"),
            "ties": self.count("tie"),
            "invalid": self.count("invalid"),
            "win_rate": self.win_rate,
            "win_rate_low": low,
            "win_rate_high": high,
            "length_controlled_win_rate": self.length_controlled,
            "mean_length_ours": fmean([len(row.ours) for row in self.rows]),
            "mean_length_theirs": fmean([len(row.theirs) for row in self.rows]),
            "first_preferred": fmean([float(row.answer.prefer == "first") for row in self.rows]),
            "prompt_tokens": sum(a.prompt_tokens for a in answers if not a.cached),
            "completion_tokens": sum(a.completion_tokens for a in answers if not a.cached),
            "cached": sum(a.cached for a in answers),
        }

    def _worths(self) -> list[float]:
        worths = [value for row in self.rows if (value := worth(row.outcome)) is not None]
        if not worths:
            raise JudgeError(f"judge {self.judge} gave no valid answer to {len(self.rows)} pairs")
        return worths


def match(
    prompts: Sequence[str],
    ours: Sequence[str],
    theirs: Sequence[str],
    judge: Judge,
    *,
    seed: int = 0,
) -> Match:
    """Have a judge compare two answers to every prompt, in random order.

    Args:
        prompts: the prompts.
        ours: answers to compute the win rate of.
        theirs: answers to compare with.
        judge: compares them.
        seed: seed of the order in which the judge sees the two answers.

    Raises:
        JudgeError: there is nothing to compare, or the judge failed.
    """
    if not prompts or not len(prompts) == len(ours) == len(theirs):
        raise JudgeError(
            f"prompts, ours and theirs must have the same, nonzero length; got {len(prompts)},"
            f" {len(ours)} and {len(theirs)}"
        )
    keys = (f"{seed}/{i}/{x}".encode(errors="surrogatepass") for i, x in enumerate(prompts))
    swaps = [bool(hashlib.blake2b(key, digest_size=1).digest()[0] & 1) for key in keys]
    pairs = [
        Pair(prompt, b, a) if swap else Pair(prompt, a, b)
        for prompt, a, b, swap in zip(prompts, ours, theirs, swaps, strict=True)
    ]
    answers = judge.judge(pairs)
    rows = []
    for p, a, b, swap, answer in zip(prompts, ours, theirs, swaps, answers, strict=True):
        outcome: Outcome = "win" if (answer.prefer == "first") != swap else "loss"
        if answer.prefer in ("tie", "invalid"):
            outcome = answer.prefer
        rows.append(Row(prompt=p, ours=a, theirs=b, swapped=swap, outcome=outcome, answer=answer))
    return Match(judge.name, rows)


def interval(
    runs: Sequence[Sequence[float]], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of the mean over runs of each run's mean, percentile method.

    Runs are drawn with replacement, then rows within each drawn run (the two-level bootstrap of
    Davison and Hinkley 1997, section 3.8), so that the interval covers the variation between
    seeds and between prompts.  With one run it is the bootstrap over rows.

    Args:
        runs: for each run, the value of each row.
        level: confidence level.
        seed: seed of the resampling.
    """
    draw = random.Random(seed)
    means = []
    for _ in range(RESAMPLES):
        drawn = draw.choices(runs, k=len(runs)) if len(runs) > 1 else runs
        means.append(fmean([fmean(draw.choices(rows, k=len(rows))) for rows in drawn]))
    means.sort()
    tail, last = (1 - level) / 2, len(means) - 1
    return means[round(tail * last)], means[round((1 - tail) * last)]


def worth(outcome: Outcome) -> float | None:
    """Points of an outcome: win 1, tie 0.5, loss 0, None for an invalid answer."""
    return _WORTH.get(outcome)


def rank(
    prompts: Sequence[str], answers: Mapping[str, Sequence[str]], judge: Judge, *, seed: int = 0
) -> dict[str, float]:
    """Round robin: name -> mean win rate over its matches, best first."""
    if len(answers) < 2:
        raise JudgeError(f"a ranking needs at least two sets of answers, got {len(answers)}")
    rates: dict[str, list[float]] = {name: [] for name in answers}
    for one, other in combinations(answers, 2):
        rate = match(prompts, answers[one], answers[other], judge, seed=seed).win_rate
        rates[one].append(rate)
        rates[other].append(1 - rate)
    means = {name: fmean(values) for name, values in rates.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _logistic(xs: Any, ys: Any) -> float | None:
    """The constant of a logistic regression on x by Newton's method; None if it diverges."""
    design, fit = np.stack([np.ones(len(xs)), xs], 1), np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-(design @ fit).clip(-30, 30)))
        hessian = (design.T * (p * (1 - p))) @ design
        if np.linalg.det(hessian) < 1e-12 or (abs(fit) > (20, 40)).any():
            return None  # the outcomes are linearly separable
        step = np.linalg.solve(hessian, design.T @ (ys - p))
        fit += step
        if abs(step).sum() < 1e-9:
            return float(fit[0])
    return None
