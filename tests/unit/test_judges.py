"""Judges and matches: counting, intervals and length; a judge behind an endpoint; the command."""

from __future__ import annotations

import csv
import json
import math
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.ext.judge.judges import (
    Answer,
    Endpoint,
    FunctionJudge,
    Match,
    Pair,
    Row,
    ScoreJudge,
    match,
    rank,
    winner_in,
)
from kedge.records.errors import JudgeError
from kedge.testing import tiny_reward_model

from .judge_server import BAD, GOOD, PROMPTS, endpoint, honest, reply, serving
from .reward_servers import raw_server
from .text_toys import word_tokenizer


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
                prompt=f"p{number}",
                ours="x" * ours,
                theirs="x" * theirs,
                swapped=False,
                outcome=outcome,  # type: ignore[arg-type]
                answer=Answer(prefer="first"),
            )
            for number, (outcome, ours, theirs) in enumerate(outcomes)
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
    repeated = [replace(row, prompt="p") for row in found.rows]
    assert Match("j", repeated).interval() == pytest.approx((0.077, 0.964), abs=1e-3)  # one prompt


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
    assert winner_in(text) == prefer


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


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    ours = [
        {"prompt": p, "completion": g, "reference": b}
        for p, g, b in zip(PROMPTS, GOOD, BAD, strict=True)
    ]
    theirs = [{"prompt": p, "completion": b} for p, b in zip(PROMPTS[::-1], BAD[::-1], strict=True)]
    return write(tmp_path / "ours.jsonl", ours), write(tmp_path / "theirs.jsonl", theirs)


def test_the_command_with_an_endpoint(
    files: tuple[str, str], serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, out = serve(honest), tmp_path / "out"
    flags = ["--endpoint", server.url, "--model", "m", "--output_dir", str(out)]
    flags += ["--price_in", "2", "--price_out", "10"]
    assert main(["judge", *files, *flags]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["win_rate"] == 1.0
    assert summary["cost"] == pytest.approx((440 * 2 + 120 * 10) / 1e6)
    lines = (out / "judgments.jsonl").read_text().splitlines()
    assert len(lines) == 40
    assert json.loads(lines[3])["ours"] == "good 3"
    assert json.loads(lines[3])["theirs"] == "bad 3"  # by prompt, not by place
    assert len((out / "judgments.csv").read_text().splitlines()) > 40
    assert "100.0%" in capsys.readouterr().out
    assert main(["judge", *files, *flags]) == 0
    assert len(server.asked) == 40


def test_everything_asked_is_written_also_what_no_file_can_hold(serve: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "half \ud800", "completion": "good \udfff", "reference": "=1+1"},
        {"prompt": "@p", "completion": "-3.5e2", "reference": "\tx"},
    ]
    ours, out = write(tmp_path / "ours.jsonl", rows), tmp_path / "out"
    server = serve(lambda number, body: reply("=HYPERLINK(1) \ud83d\nWinner: A"))
    flags = ["--endpoint", server.url, "--model", "m", "--output_dir", str(out)]
    assert main(["judge", ours, "@reference", *flags]) == 0
    kept = [json.loads(line) for line in (out / "judgments.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["ours"], row["theirs"]) for row in kept] == [
        tuple(row.values()) for row in rows
    ]
    with (out / "judgments.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["reply"] for row in table] == ["'=HYPERLINK(1) \ufffd\nWinner: A"] * 2
    assert [row["prompt"] for row in table] == ["half \\ud800", "'@p"]
    assert [row["ours"] for row in table] == ["good \\udfff", "-3.5e2"]  # a number is no formula
    assert [row["theirs"] for row in table] == ["'=1+1", "'\tx"]


def test_a_folder_that_cannot_be_written_costs_no_question(
    files: tuple[str, str], serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, taken = serve(honest), tmp_path / "taken"
    taken.write_text("")
    for folder in ("", str(taken), str(taken / "below")):
        flags = ["--endpoint", server.url, "--model", "m", "--output_dir", folder]
        assert main(["judge", *files, *flags]) == 2
        assert "--output_dir" in capsys.readouterr().err
    assert server.asked == []


def test_the_command_with_functions_and_a_reference_column(
    files: tuple[str, str], tmp_path: Path
) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def longer(prompts, answers):\n    return [len(a) for a in answers]\n")
    flags = ["--score", f"{code}:longer", "--output_dir", str(tmp_path / "out"), "--limit", "5"]
    assert main(["judge", files[0], "@reference", *flags]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["prompts"], summary["wins"]) == (5, 5)


def test_the_command_with_a_reward_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_reward_model(vocab_size=32).save_pretrained(model)
    word_tokenizer().save_pretrained(model)
    rows = [{"prompt": "w3 ", "completion": f"w{i} w5", "reference": "w7"} for i in range(3, 9)]
    ours = write(tmp_path / "ours.jsonl", rows)
    flags = ["--reward_model", str(model), "--output_dir", str(tmp_path / "out")]
    assert main(["judge", ours, "@reference", *flags]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["wins"] + summary["losses"] + summary["ties"] == 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--endpoint", "http://x"], "--endpoint needs --model"),
        (["--function", "none.py:f"], "none.py"),
        ([], "one of the arguments"),
    ],
)
def test_mistakes_are_one_line(
    change: list[str], said: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", *files, *change]) == 2
    assert said in capsys.readouterr().err


def test_missing_files_columns_and_prompts_are_named(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = ["--score", "x.py:f", "--output_dir", str(tmp_path / "out")]
    for ours, theirs, said in (
        (files[0], "nothing.jsonl", "the file nothing.jsonl does not exist"),
        (files[0], "@gold", "has no text in column 'gold'"),
        (
            files[0],
            write(tmp_path / "few.jsonl", [{"prompt": "a", "completion": "b"}]),
            "too few answers to 40",
        ),
        (write(tmp_path / "list.jsonl", [[1]]), files[1], "line 1 is not a JSON object"),  # type: ignore[list-item]
    ):
        assert main(["judge", ours, theirs, *score]) == 2
        assert said in capsys.readouterr().err
