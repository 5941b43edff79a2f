"""The verifiers on whole public datasets: every row accepted, in many renderings, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kedge.rewards import gsm8k


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
