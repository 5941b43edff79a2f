"""Verifiers of texts, formats, lengths and expressions, and what all verifiers share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from kedge import verifiers
from kedge.errors import ConfigError, RewardError
from kedge.verifiers.base import Unanswered, Verifier, map_parallel
from kedge.verifiers.texts import f1, has_think_answer, normalize
from tests.unit.test_verifiers_constraints import CASES

GOOD = "<think>1 + 1</think> <answer>2</answer>"


def test_import_is_light() -> None:
    code = (
        "import sys, kedge.verifiers;"
        "print([m for m in ('torch', 'numpy', 'sympy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_public_exists() -> None:
    assert all(hasattr(verifiers, name) for name in verifiers.__all__)


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        (GOOD, True, True),
        (f"  {GOOD}\n", True, True),
        ("<think>a\nb</think>\n\n<answer>c\nd</answer>", True, True),
        ("<think>a</think><answer>b</answer>", True, True),
        (f"{GOOD} and more", False, True),
        (f"Well. {GOOD}", False, True),
        (f"{GOOD}{GOOD}", False, True),
        ("a</think> <answer>b</answer>", False, True),
        ("<think>a</think> so <answer>b</answer>", False, False),
        ("<think>a <answer>b</answer></think>", False, False),
        ("<answer>b</answer><think>a</think>", False, False),
        ("<think></think><answer>b</answer>", False, True),
        ("<think>a</think><answer> </answer>", False, True),
        ("<think>a</think><answer>b", False, False),
        ("<THINK>a</THINK><ANSWER>b</ANSWER>", False, False),
        ("<think>a</answer></think><answer>", False, False),
        ("", False, False),
    ],
)
def test_think_answer(text: str, strict: bool, loose: bool) -> None:
    assert has_think_answer(text) is strict
    assert has_think_answer(text, strict=False) is loose
    assert verifiers.think_answer([text]) == [float(strict)]
    assert verifiers.r1_style_format([text], prompts=["x"]) == [float(loose)]


def test_think_opened_by_the_prompt() -> None:
    assert has_think_answer("a</think><answer>b</answer>", opened=True)
    assert not has_think_answer(GOOD, opened=True)


ENORMOUS: dict[str, tuple[list[Any], list[str]]] = {
    "formats": (
        [verifiers.r1_style_format, verifiers.think_answer],
        ["<think>", "</think>", "</think><answer>", "<answer>", " "],
    ),
    "numbers": (
        [verifiers.gsm8k],
        ["1,", "1,234,", "\\boxed{", "####", "#### 1", "-", "1/", "$", "answer is ", "<answer>",
         "1 ", " ", "{", "}", "\\frac{1}", "\n", "\x00", "é1.", "= 1", "1e5", "\\boxed 1"],
    ),
    "mathematics": (
        [verifiers.math_verifier(symbolic=False)],
        ["$", "$x", "\\(", "\\boxed{", "answer is ", "{,", " and "],
    ),
    "instructions": (
        [verifiers.ifeval],
        ["*", "* a\n", "[", "<<", ".", "A. ", "\n\n", "***", "p. ", "**a", " "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENORMOUS)
def test_time_is_linear_in_enormous_responses(kind: str) -> None:
    """Quadratic would be hours."""
    functions, pieces = ENORMOUS[kind]
    truth: Any = "18"
    if kind == "instructions":
        pytest.importorskip("py3langid")
        truth = {"instruction_id_list": [c[0] for c in CASES[:30]]}
        truth["kwargs"] = [given for _, given, *_ in CASES[:30]]
    for piece in pieces:
        text = piece * (100_000 // len(piece))
        began = time.process_time()
        for verify in functions:
            (score,) = verify([text], ground_truth=[truth])
            assert score == 0.0 or kind == "instructions"
        assert time.process_time() - began < 10, piece


def test_tag_count() -> None:
    scores = verifiers.tag_count_reward()([GOOD, "<think><think></think>", "", GOOD + "<think>"])
    assert scores == [1.0, 0.25, 0.0, 0.75]
    with pytest.raises(ConfigError, match="tags"):
        verifiers.tag_count_reward([])


def test_f1_by_hand() -> None:
    # common: cat, sat (2); response has 3 words, truth 4: 2 * 2 / 7
    assert f1("The cat sat, cat!", "a cat sat on mats") == pytest.approx(4 / 7)
    assert f1("", "") == f1("the", "a") == 1.0
    assert f1("", "cat") == f1("dog", "cat") == 0.0


def test_normalize() -> None:
    assert normalize("  The \uff23\uff21\uff34's\tStraße, an A ") == "cats strasse"


@pytest.mark.parametrize(
    ("text", "truth", "match", "exact", "contains"),
    [
        ("Paris", "Paris", 1, 1, 1),
        (" Paris\n", "Paris", 1, 1, 1),
        ("the paris.", "Paris", 1, 0, 1),
        ("It is Paris", "Paris", 0, 0, 1),
        (r"It is \boxed{Paris}", "Paris", 1, 0, 0),
        ("<answer>Paris</answer>", ["Lyon", "Paris"], 1, 0, 0),
        ("comparison", "Paris", 0, 0, 0),
        ("Lyon", "Paris", 0, 0, 0),
        ("", "Paris", 0, 0, 0),
        ("42", 42, 1, 1, 1),
    ],
)
def test_string_verifiers(text: str, truth: object, match: int, exact: int, contains: int) -> None:
    assert verifiers.string_match([text], ground_truth=[truth]) == [match]
    assert verifiers.exact_match([text], ground_truth=[truth]) == [exact]
    assert verifiers.string_contains([text], ground_truth=[truth]) == [contains]


def test_string_f1_takes_the_best() -> None:
    assert verifiers.string_f1(["cat"], ground_truth=[["cat sat", "dog"]]) == [pytest.approx(2 / 3)]


@pytest.mark.parametrize("truth", [[], [None], {"a": 1}])
def test_string_truths_must_be_texts(truth: object) -> None:
    with pytest.raises(RewardError, match="string_match"):
        verifiers.string_match(["x"], ground_truth=[truth])


def test_soft_overlong_by_hand() -> None:
    reward = verifiers.soft_overlong_punishment(max_length=10, cache=4)
    lengths = (0, 6, 7, 10, 11, 99)
    assert reward(completion_ids=[[0] * n for n in lengths]) == [0, 0, -0.25, -1, -1, -1]
    with pytest.raises(ConfigError, match="cache=11"):
        verifiers.soft_overlong_punishment(max_length=10, cache=11)


def test_lengths_by_hand() -> None:
    ids = [[0] * 5, [0] * 10, [0] * 40]
    wanted = [10, 10, None]
    assert verifiers.length_close_to()(completion_ids=ids, ground_truth=wanted) == [0.5, 1.0, None]
    at_most = verifiers.length_at_most(column="limit", slope=0.05, offset=0.5)
    assert at_most(completion_ids=ids, limit=[10, 8, 10]) == pytest.approx([0.75, 0.4, 0.0])
    with pytest.raises(RewardError, match="'limit'"):
        at_most(completion_ids=ids, limit=[10, -8, 10])


def test_unanswered_scores_zero_and_is_counted() -> None:
    def check(text: str, _: object) -> float:
        if text == "slow":
            raise Unanswered("timeouts")
        return 1.0

    seen: list[tuple[str, float]] = []
    verify = Verifier(check, name="toy", column=None)
    texts = ["slow", "x", "slow"]
    scores = verify(texts, log_metric=lambda name, value: seen.append((name, value)))
    assert scores == [0.0, 1.0, 0.0]
    assert seen == [("timeouts/toy", 2.0)]
    assert verify(["slow"]) == [0.0]


def test_parallel_keeps_order_and_raises() -> None:
    gate = threading.Barrier(3, timeout=10)

    def wait(n: int) -> int:
        gate.wait()
        return n

    assert map_parallel(wait, [3, 1, 2], threads=3) == [3, 1, 2]
    with pytest.raises(ZeroDivisionError):
        map_parallel(lambda n: 1 / n, [1, 0], threads=2)


def test_what_is_no_completion_is_an_error() -> None:
    with pytest.raises(RewardError, match="got int"):
        verifiers.gsm8k([3], ground_truth=["3"])
    with pytest.raises(RewardError, match="1 values for 2"):
        verifiers.gsm8k(["3", "3"], ground_truth=["3"])


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
    assert verifiers.regex_reward(**options)([text]) == [score]  # type: ignore[arg-type]


def test_regex_from_a_column() -> None:
    scores = verifiers.regex_match(["ab", "ab", "x"], ground_truth=["b$", "^b", None])
    assert scores == [1.0, 0.0, None]


def test_catastrophic_backtracking_scores_zero_in_time() -> None:
    seen: list[str] = []
    verify = verifiers.regex_reward(r"(x+x+)+y", timeout=2.0)
    began = time.perf_counter()
    scores = verify(["x" * 5000, "xxy"], log_metric=lambda name, value: seen.append(name))
    assert scores == [0.0, 1.0]
    assert seen == ["timeouts/regex"]
    assert time.perf_counter() - began < 60


def test_bad_patterns_are_errors() -> None:
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        verifiers.regex_reward("(")
    with pytest.raises(ConfigError, match="mode"):
        verifiers.regex_reward("a", mode="find")
    with pytest.raises(RewardError, match="not a valid regular expression"):
        verifiers.regex_match(["x"], ground_truth=["("])
    with pytest.raises(RewardError, match="must be a regular expression"):
        verifiers.regex_match(["x"], ground_truth=[3])
