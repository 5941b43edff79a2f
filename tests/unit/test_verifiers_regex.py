"""Rewards from regular expressions, and their time limit."""

from __future__ import annotations

import pickle
import threading
import time

import pytest

from kedge.errors import ConfigError, RewardError
from kedge.verifiers import gsm8k, regex_match, regex_reward


def test_works_in_a_thread_and_after_a_pickle() -> None:
    found: list[list[float | None]] = []
    verify = pickle.loads(pickle.dumps(regex_match))
    thread = threading.Thread(target=lambda: found.append(verify(["ab"], ground_truth=["b$"])))
    thread.start()
    thread.join()
    assert found == [[1.0]]
    assert pickle.loads(pickle.dumps(gsm8k))(["3"], ground_truth=["3"]) == [1.0]


@pytest.mark.parametrize(
    ("options", "text", "score"),
    [
        ({"pattern": r"\d+"}, "a 12 b", 1.0),
        ({"pattern": r"\d+", "mode": "match"}, "a 12 b", 0.0),
        ({"pattern": r"\d+", "mode": "fullmatch"}, "12", 1.0),
        ({"pattern": r"\d+", "mode": "fullmatch"}, "12 ", 0.0),
        ({"pattern": r"a.b"}, "a\nb", 1.0),
        ({"pattern": "ABC"}, "abc", 0.0),
        ({"pattern": "ABC", "ignore_case": True}, "abc", 1.0),
        ({"pattern": ""}, "", 1.0),
    ],
)
def test_regex(options: dict[str, object], text: str, score: float) -> None:
    assert regex_reward(**options)([text]) == [score]  # type: ignore[arg-type]


def test_regex_from_a_column() -> None:
    assert regex_match(["ab", "ab", "x"], ground_truth=["b$", "^b", None]) == [1.0, 0.0, None]


def test_catastrophic_backtracking_scores_zero_in_time() -> None:
    seen: list[str] = []
    verify = regex_reward(r"(x+x+)+y", timeout=2.0)
    began = time.perf_counter()
    scores = verify(["x" * 5000, "xxy"], log_metric=lambda name, value: seen.append(name))
    assert scores == [0.0, 1.0]
    assert seen == ["timeouts/regex"]
    assert time.perf_counter() - began < 60


def test_enormous_texts_pass_through() -> None:
    assert regex_reward("needle")(["x" * 3_000_000 + "needle"]) == [1.0]


def test_bad_patterns_are_errors() -> None:
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        regex_reward("(")
    with pytest.raises(ConfigError, match="mode"):
        regex_reward("a", mode="find")
    with pytest.raises(RewardError, match="not a valid regular expression"):
        regex_match(["x"], ground_truth=["("])
    with pytest.raises(RewardError, match="must be a regular expression"):
        regex_match(["x"], ground_truth=[3])
