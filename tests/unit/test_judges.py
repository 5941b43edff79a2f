"""Judges and matches: counting, intervals, and length."""

from __future__ import annotations

import math
import random

import pytest

from kedge.errors import JudgeError
from kedge.judges import FunctionJudge, Match, Row, ScoreJudge, match, rank
from kedge.judges.base import Answer

from .judge_server import BAD, GOOD, PROMPTS


def prefers_good(prompts: list[str], a: list[str], b: list[str]) -> list[float]:
    return [float(x.startswith("good")) for x in a]


def prefers_first(prompts: list[str], a: list[str], b: list[str]) -> list[float]:
    return [1.0 for _ in a]


def rows(outcomes: list[tuple[str, int, int]]) -> Match:
    """A match of outcomes and lengths."""
    return Match(
        "j",
        [
            Row(
                prompt="p",
                ours="x" * ours,
                theirs="x" * theirs,
                swapped=False,
                outcome=outcome,  # type: ignore[arg-type]
                answer=Answer(prefer="first"),
            )
            for outcome, ours, theirs in outcomes
        ],
    )


def test_the_better_side_wins_whatever_the_order() -> None:
    judge = FunctionJudge(prefers_good)
    assert match(PROMPTS, GOOD, BAD, judge).win_rate == 1.0
    assert match(PROMPTS, BAD, GOOD, judge).win_rate == 0.0


def test_a_judge_that_likes_the_first_answer_decides_nothing() -> None:
    found = match(PROMPTS, GOOD, BAD, FunctionJudge(prefers_first), seed=3)
    swapped = sum(row.swapped for row in found.rows)
    assert 10 < swapped < 30  # the order is drawn
    assert found.win_rate == 1 - swapped / 40
    assert found.summary()["first_preferred"] == 1.0
    again = match(PROMPTS, GOOD, BAD, FunctionJudge(prefers_first), seed=3)
    assert [r.swapped for r in again.rows] == [r.swapped for r in found.rows]


def test_ties_are_half_and_invalid_answers_are_left_out_and_counted() -> None:
    found = rows([("win", 1, 1)] * 3 + [("tie", 1, 1)] * 2 + [("loss", 1, 1), ("invalid", 1, 1)])
    assert found.win_rate == pytest.approx(4 / 6)
    summary = found.summary()
    assert [summary[n] for n in ("wins", "losses", "ties", "invalid")] == [3, 1, 2, 1]
    with pytest.raises(JudgeError, match="no valid answer to 1 pairs"):
        rows([("invalid", 1, 1)]).summary()


def test_the_interval_is_that_of_the_mean() -> None:
    found = rows([("win", 1, 1)] * 60 + [("loss", 1, 1)] * 40)
    low, high = found.interval()
    assert low == pytest.approx(0.6 - 1.96 * math.sqrt(0.24 / 100), abs=0.02)
    assert high == pytest.approx(0.6 + 1.96 * math.sqrt(0.24 / 100), abs=0.02)
    assert found.interval() == (low, high)  # seeded


def test_length_control_takes_out_what_length_bought() -> None:
    draw = random.Random(0)
    outcomes = []
    for _ in range(4000):
        gap = draw.choice([-20, -10, 0, 10, 20, 30])  # longer more often than not
        chance = 1 / (1 + math.exp(-3 * math.tanh(gap / 17.8)))  # length alone decides
        outcomes.append(("win" if draw.random() < chance else "loss", 50 + gap, 50))
    found = rows(outcomes)
    assert found.win_rate > 0.55
    assert found.controlled == pytest.approx(0.5, abs=0.03)
    assert rows([("win", 5, 5), ("loss", 5, 5)]).controlled is None


def test_scores_are_compared_and_may_tie() -> None:
    judge = ScoreJudge(lambda prompts, answers: [float(a.startswith("good")) for a in answers])
    assert match(PROMPTS, GOOD, BAD, judge).win_rate == 1.0
    assert match(PROMPTS, GOOD, GOOD, judge).count("tie") == 40
    near = ScoreJudge(lambda prompts, answers: [len(a) / 100 for a in answers], margin=0.05)
    assert match(PROMPTS, GOOD, BAD, near).count("tie") == 40


def test_a_ranking_of_three() -> None:
    judge = ScoreJudge(lambda prompts, answers: [float(len(a)) for a in answers])
    players = {"short": ["a"] * 3, "long": ["aaa"] * 3, "middle": ["aa"] * 3}
    assert rank(["p"] * 3, players, judge) == {"long": 1.0, "middle": 0.5, "short": 0.0}


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (FunctionJudge(lambda p, a, b: [2.0 for _ in p], "f"), "must return numbers from 0"),
        (FunctionJudge(lambda p, a, b: [1.0], "f"), "must return 40 values, got 1"),
        (FunctionJudge(lambda p, a, b: 1 / 0, "f"), "judge f raised ZeroDivisionError"),  # type: ignore[arg-type, return-value]
    ],
)
def test_functions_that_fail_are_named(judge: FunctionJudge, said: str) -> None:
    with pytest.raises(JudgeError, match=said):
        match(PROMPTS, GOOD, BAD, judge)
