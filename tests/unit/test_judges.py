"""Judges and matches: counting, intervals and length; a judge behind an endpoint."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from kedge import judges
from kedge.errors import JudgeError
from kedge.judges import Answer, Endpoint, FunctionJudge, Match, Pair, Row, ScoreJudge, match, rank

from .judge_server import BAD, GOOD, PROMPTS, endpoint, honest, reply, serving
from .reward_servers import raw_server


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
    assert found.length_controlled == pytest.approx(0.5, abs=0.03)
    assert rows([("win", 5, 5), ("loss", 5, 5)]).length_controlled is None


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


serve = pytest.fixture(serving)


@pytest.mark.parametrize(
    ("text", "prefer"),
    [
        ("It is right.\nWinner: A", "first"),
        ("winner: response_B", "second"),
        ('"Winner: tie"', "tie"),
        ("Winner: A? No.\nWinner: B", "second"),
        ("**Winner: B**", "second"),
        ("A", "first"),
        (" b. ", "second"),
        ("Both are fine.", "invalid"),
        ("A is good and B is bad", "invalid"),
        ("Winner: Anna", "invalid"),
        ("", "invalid"),
    ],
)
def test_what_a_judge_says_is_read(text: str, prefer: str) -> None:
    assert judges.winner_in(text) == prefer


def test_an_endpoint_is_asked_and_counted(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server = serve(honest)
    judge, _ = endpoint(server, key_env="MY_KEY")
    found = match(PROMPTS, GOOD, BAD, judge)
    assert found.win_rate == 1.0
    assert len(server.asked) == 40
    assert server.asked[0]["model"] == "judge-1"
    assert server.headers[0]["Authorization"] == "Bearer secret"
    summary = found.summary()
    assert (summary["prompt_tokens"], summary["completion_tokens"]) == (440, 120)


def test_texts_with_braces_and_places_are_passed_on_as_they_are(serve: Any) -> None:
    server = serve(honest)
    judge, _ = endpoint(server)
    judge.judge([Pair("{first} {x}", "good {second}", "bad")])
    assert "{first} {x}" in server.asked[0]["messages"][0]["content"]
    assert "good {second}" in server.asked[0]["messages"][0]["content"]


def test_requests_run_at_the_same_time_but_no_more_than_allowed(serve: Any) -> None:
    running, most, turn, three = 0, 0, threading.Lock(), threading.Barrier(3, timeout=60)

    def slow(number: int, body: dict[str, Any]) -> Any:
        nonlocal running, most
        with turn:
            running += 1
            most = max(most, running)
        three.wait()
        with turn:
            running -= 1
        return honest(number, body)

    judge, _ = endpoint(serve(slow), concurrency=3)
    match(PROMPTS[:12], GOOD[:12], BAD[:12], judge)
    assert most == 3


def test_rate_limits_and_server_errors_are_tried_again(serve: Any) -> None:
    def flaky(number: int, body: dict[str, Any]) -> Any:
        if number == 0:
            return 429, {"Retry-After": "7"}, {"error": "slow down"}
        if number == 1:
            return 503, {}, b"<html>busy</html>"
        if number == 2:
            return b"this is no JSON"
        if number == 3:
            return {"choices": []}
        return honest(number, body)

    server = serve(flaky)
    judge, waits = endpoint(server, concurrency=1)
    assert match(PROMPTS[:1], GOOD[:1], BAD[:1], judge).win_rate == 1.0
    assert len(server.asked) == 5
    assert waits[0] == 7.0
    assert 1.0 <= waits[1] <= 2.0
    assert 2.0 <= waits[2] <= 4.0


def test_a_time_out_is_tried_again(serve: Any) -> None:
    asked_again = threading.Event()

    def hangs(number: int, body: dict[str, Any]) -> Any:
        asked_again.wait(60) if number == 0 else asked_again.set()
        return honest(number, body)

    judge, waits = endpoint(serve(hangs), timeout=1.0)
    assert match(PROMPTS[:1], GOOD[:1], BAD[:1], judge).win_rate == 1.0
    assert len(waits) == 1


def test_malformed_answers_are_counted_not_asked_again(serve: Any) -> None:
    server = serve(lambda number, body: reply("Hard to say." if number % 2 else "Winner: A"))
    judge, _ = endpoint(server, concurrency=1)
    found = match(PROMPTS, GOOD, BAD, judge)
    assert found.count("invalid") == 20
    assert len(server.asked) == 40


def test_a_refusal_ends_at_once_and_never_shows_the_key(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = serve(lambda number, body: (401, {}, {"error": "bad key sk-secret"}))
    judge, waits = endpoint(server, concurrency=2)
    with pytest.raises(JudgeError, match=r"answered 401 .*bad key.*OPENAI_API_KEY") as caught:
        match(PROMPTS, GOOD, BAD, judge)
    assert "sk-secret" not in str(caught.value)
    assert waits == []
    assert len(server.asked) <= 4


def test_a_server_killed_half_way_is_not_paid_twice(serve: Any, tmp_path: Path) -> None:
    up = False

    def dies(number: int, body: dict[str, Any]) -> Any:
        return honest(number, body) if up or number < 17 else (500, {}, {"error": "gone"})

    server, cache = serve(dies), tmp_path / "deep" / "replies.sqlite"
    with pytest.raises(JudgeError, match="17 of 40 pairs are answered and cached"):
        match(PROMPTS, GOOD, BAD, endpoint(server, retries=1, concurrency=4, cache=cache)[0])
    assert server.paid == 17
    up = True
    found = match(
        PROMPTS, GOOD, BAD, endpoint(server, cache=cache)[0]
    )  # another process, as it were
    assert found.win_rate == 1.0
    assert server.paid == 40
    assert sum(row.answer.cached for row in found.rows) == 17
    assert found.summary()["prompt_tokens"] == 23 * 11


def test_another_question_is_another_key(serve: Any, tmp_path: Path) -> None:
    server = serve(honest)
    pair = [Pair("p", "good", "bad")]
    for options in ({}, {}, {"temperature": 0.5}, {"max_tokens": 9}):
        endpoint(server, cache=tmp_path / "c.sqlite", **options)[0].judge(pair)
    assert len(server.asked) == 3  # the second was known


def test_the_key_goes_to_no_other_host(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    other = serve(honest)
    server = serve(lambda number, body: (307, {"Location": other.url}, {}))
    judge, waits = endpoint(server)
    with pytest.raises(JudgeError, match=r"answered 307 .*redirects are not followed"):
        judge.judge([Pair("p", "good", "bad")])
    assert (other.asked, waits) == ([], [])


def test_a_key_that_cannot_be_sent_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\nx")
    with pytest.raises(JudgeError, match="OPENAI_API_KEY must be one line") as caught:
        Endpoint("http://127.0.0.1:9", "m").judge([Pair("p", "a", "b")])
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"template": "{prompt} {first}"}, r"template must contain \{second\}"),
        ({"base_url": "localhost:8000"}, "must begin with http"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(JudgeError, match=said):
        Endpoint(**({"base_url": "http://x", "model": "m"} | options))


def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.judges.MAX_REPLY", 1 << 16)
    limits = {"answered with more than 65536 bytes": (b"x" * (1 << 17), 20.0)}
    for said, (body, timeout) in (limits | {"no answer after 0.2 s": (None, 0.2)}).items():
        answer = None if body is None else b"HTTP/1.1 200 OK\r\n\r\n" + body  # None: it drips
        with raw_server(lambda *_: answer) as (url, _), pytest.raises(JudgeError, match=said):  # noqa: B023
            Endpoint(url, "m", timeout=timeout, retries=0).judge([Pair("p", "a", "b")])
