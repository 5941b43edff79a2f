"""The verifiers on whole public datasets: every row accepted, in many renderings, or refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kedge.verifiers import Sandbox, code_verifier, gsm8k, ifeval, math, math_verifier
from tests.unit.sandbox_attacks import ISOLATION

code = code_verifier(sandbox=ISOLATION)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def with_commas(text: str) -> str:
    whole, point, decimals = text.partition(".")
    sign, digits = whole[: whole.startswith("-")], whole.lstrip("-")
    return f"{sign}{int(digits):,}{point}{decimals}"


RENDERINGS: dict[str, Callable[[str], str]] = {
    "boxed": r"So the total is \boxed{{{}}}.".format,
    "hashes": "10 + 20 = 30\n#### {}".format,
    "sentence": "After 3 days and 7 nights, she is left with {} of them.".format,
    "stated": "The answer is {} (out of 12345).".format,
    "money": r"\boxed{{\${}}}".format,
    "tag": "<think>maybe 99999</think> <answer>{}</answer>".format,
    "commas": lambda a: f"Final answer: {with_commas(a)}.",
    "latex commas": lambda a: rf"\boxed{{{with_commas(a).replace(',', '{,}')}}}",
    "bold": "**{}**".format,
    "unit": r"\boxed{{{}\text{{ apples}}}}".format,
}


def accepts(renderings: list[str], truths: list[Any], wanted: float) -> None:
    scores = gsm8k(renderings, ground_truth=truths)
    wrong = [(r, t) for r, t, s in zip(renderings, truths, scores, strict=True) if s != wanted]
    assert wrong == []


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "test"])
def test_gsm8k_agrees_on_every_row(shared: Path, split: str) -> None:
    solutions = [row["answer"] for row in rows_of(shared / f"data/gsm8k/{split}.jsonl")]
    answers = [s.rsplit("####", 1)[1].strip().replace(",", "") for s in solutions]
    assert len(answers) == {"train": 4000, "test": 1000}[split]
    negative = [a[1:] if a.startswith("-") else f"-{a}" for a in answers]
    accepts(solutions, solutions, 1.0)  # the dataset's own solution, read as a response
    for name, render in RENDERINGS.items():
        accepts([render(a) for a in answers], solutions, 1.0)
        if name != "money":
            accepts([render(a) for a in negative], negative, 1.0)
        signed = [n for n, a in zip(negative, answers, strict=True) if int(a) != 0]
        accepts([render(n) for n in signed], [a for a in answers if int(a) != 0], 0.0)
        accepts([render(str(int(a) + 1)) for a in answers], solutions, 0.0)
        accepts([render(f"{a}0") for a in answers if int(a)], [a for a in answers if int(a)], 0.0)


@pytest.mark.parametrize(
    ("name", "count"), [("addsub", 395), ("multiarith", 600), ("singleeq", 508)]
)
def test_arithmetic_agrees_on_every_row(shared: Path, name: str, count: int) -> None:
    targets = [row["target"] for row in rows_of(shared / f"data/arithmetic/{name}.jsonl")]
    assert len(targets) == count
    for render in RENDERINGS.values():
        accepts([render(str(t)) for t in targets], targets, 1.0)
        accepts(
            [render(f"{float(t):g}") for t in targets if t == round(t, 2)],
            [t for t in targets if t == round(t, 2)],
            1.0,
        )
        accepts([render(f"{t + 1}") for t in targets], targets, 0.0)
        accepts([render(f"-{t}") for t in targets if t], [t for t in targets if t], 0.0)
    simple = [Fraction(t).limit_denominator(100) for t in targets]
    accepts([rf"\boxed{{\frac{{{f.numerator}}}{{{f.denominator}}}}}" for f in simple], targets, 1.0)
    accepts([f"It is {f}" for f in simple], targets, 1.0)


def math500(shared: Path) -> tuple[list[str], list[str]]:
    rows = json.loads((shared / "data/math500/math500_test.json").read_text(encoding="utf-8"))
    return [row["answer"] for row in rows], [row["solution"] for row in rows]


def in_parentheses(answer: str) -> str:
    single = not any(part in answer for part in (",", "\\pm", "\\text", "\\mbox"))
    return rf"\left({answer}\right)" if single else answer


REWRITINGS: dict[str, Callable[[str], str]] = {
    "itself": str,
    "dfrac": lambda a: a.replace("\\dfrac", "\\frac").replace("\\frac", "\\dfrac"),
    "no blanks": lambda a: a if "\\text" in a else a.replace(" ", ""),
    "more blanks": lambda a: a.replace("+", " + ").replace(",", ", ").replace(", \\!", ",\\!"),
    "dollars": "${}$".format,
    "full stop": "{}.".format,
    "variable": lambda a: a if "=" in a or "\\in" in a else f"x = {a}",
    "degrees": lambda a: a.replace("^\\circ", "^{\\circ}"),
    "degrees in words": lambda a: a.replace("^\\circ", " \\text{ degrees}"),
    "unicode minus": lambda a: a.replace("-", "\u2212"),
    "thousands": lambda a: f"{int(a):,}" if a.isdigit() else a,
    "latex thousands": lambda a: f"{int(a):,}".replace(",", "{,}") if a.isdigit() else a,
    "decimal point": lambda a: f"{a}.0" if a.isdigit() else a,
    "parentheses": in_parentheses,
    "display": lambda a: a.replace("\\left", "\\bigl").replace("\\right", "\\bigr"),
    "square matrix": lambda a: a.replace("pmatrix", "bmatrix"),
    "mathrm": lambda a: a.replace("\\text", "\\mathrm").replace("\\mbox", "\\mathrm"),
    "thin blanks": lambda a: a.replace("\\pi", "\\,\\pi").replace("\\sqrt", "\\;\\sqrt"),
}


@pytest.mark.parametrize("name", REWRITINGS)
def test_math500_answers_equal_their_rewritings(shared: Path, name: str) -> None:
    answers, solutions = math500(shared)
    assert len(answers) == 500
    verify = math_verifier(symbolic=False)
    texts = [rf"Hence \boxed{{{REWRITINGS[name](answer)}}}" for answer in answers]
    for truths in (answers, solutions):
        scores = verify(texts, ground_truth=truths)
        assert [(t, a) for t, a, s in zip(texts, answers, scores, strict=True) if s != 1.0] == []
    if name == "itself":  # solutions end on their answers
        assert verify(solutions, ground_truth=answers) == [1.0] * 500


ALIKE = {  # answers of different problems that do mean the same, by the rules of the verifier
    frozenset(pair)
    for pair in (
        ("5", "x=5"), ("1,-2", "-2,1"), ("15", r"15\mbox{ cm}^2"), ("36", r"\$36"),
        ("36", r"36^\circ"), (r"36^\circ", r"\$36"), (r"\frac14", r"\frac{1}{4}"),
        (r"10,\!080", "10080"), (r"2 \sqrt{5}", r"2\sqrt{5}"), ("90", r"90^\circ"),
        ("120", r"120^\circ"), ("30", r"30^\circ"),
    )
}  # fmt: skip


@pytest.mark.slow
def test_math500_answers_equal_no_other(shared: Path) -> None:
    answers = sorted(set(math500(shared)[0]))
    verify = math_verifier(symbolic=False)
    for truth in answers:
        scores = verify(
            [rf"\boxed{{{other}}}" for other in answers], ground_truth=[truth] * len(answers)
        )
        for other, score in zip(answers, scores, strict=True):
            alike = other == truth or frozenset((other, truth)) in ALIKE
            assert score == float(alike), (other, truth)


@pytest.mark.slow
def test_math500_answers_equal_no_neighbor_by_algebra(shared: Path) -> None:
    pytest.importorskip("math_verify")
    answers, _ = math500(shared)
    for distance in (1, 2, 3, 17):
        neighbors = answers[distance:] + answers[:distance]
        scores = math([rf"\boxed{{{a}}}" for a in neighbors], ground_truth=answers)
        for truth, other, score in zip(answers, neighbors, scores, strict=True):
            alike = other == truth or frozenset((other, truth)) in ALIKE
            assert score == float(alike), (other, truth)


def humaneval(shared: Path) -> list[dict[str, Any]]:
    with gzip.open(shared / "data/humaneval/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 164
    return rows


def fenced(row: dict[str, Any]) -> str:
    return f"Sure.\n```python\n{row['prompt']}{row['canonical_solution']}```\nThat is all."


def never(row: dict[str, Any]) -> str:
    return "    return None\n"


def off(row: dict[str, Any]) -> str:
    """The reference, its result spoiled."""
    name = row["entry_point"]
    return (
        f"{row['canonical_solution']}\n_right = {name}\ndef {name}(*a):\n    r = _right(*a)\n"
        "    if isinstance(r, bool): return not r\n"
        "    if isinstance(r, (int, float)): return r + 1\n"
        "    return None if r else [0]\n"
    )


def unfinished(row: dict[str, Any]) -> str:
    return "    while True: pass\n" if row["task_id"].endswith("07") else "    return (\n"


@pytest.mark.slow
@pytest.mark.parametrize("write", [lambda r: r["canonical_solution"], fenced])
def test_humaneval_references_pass(shared: Path, write: Callable[[dict[str, Any]], str]) -> None:
    rows = humaneval(shared)
    scores = code([write(row) for row in rows], ground_truth=rows)
    assert [row["task_id"] for row, s in zip(rows, scores, strict=True) if s != 1.0] == []


@pytest.mark.slow
@pytest.mark.parametrize("write", [never, off, unfinished])
def test_humaneval_broken_solutions_fail(
    shared: Path, write: Callable[[dict[str, Any]], str]
) -> None:
    rows = humaneval(shared)
    verify = code_verifier(sandbox=Sandbox(seconds=1.0, isolation=ISOLATION))
    scores = verify([write(row) for row in rows], ground_truth=rows)
    assert [row["task_id"] for row, s in zip(rows, scores, strict=True) if s != 0.0] == []


def test_every_ifeval_row_can_be_scored(shared: Path) -> None:
    pytest.importorskip("py3langid")
    rows = rows_of(shared / "data/ifeval/input_data.jsonl")
    columns = {name: [row[name] for row in rows] for name in ("instruction_id_list", "kwargs")}
    scores = ifeval([row["prompt"] for row in rows], **columns)
    assert all(score is not None and 0 <= score <= 1 for score in scores)
    assert ifeval([""] * len(rows), **columns) == [0.0] * len(rows)
