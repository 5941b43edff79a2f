"""Answers of arithmetic word problems (GSM8K and the like)."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from kedge.errors import ConfigError, RewardError
from kedge.verifiers.answers import marked_answer, stated_answer
from kedge.verifiers.base import Verifier
from kedge.verifiers.mathematics.numbers import Number, clean, find_numbers

ROUNDED_FROM = 6  # a ground truth with that many decimals was rounded there
PROSE_WORDS, PROSE_LETTERS = 4, 300  # a mark with so many words holds a sentence
_NEGATIVE = re.compile(r"(?:\bnegative |(?:\A|(?<=\bis ))minus )(?=[$€£]?[0-9])", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]{2,}")
_JOINED = re.compile(r"\s?(?:or|and|to|-|:|/)\s?[-+]?(?:(?:\\?\$|[€£¥])\s?)?\.?[0-9]")  # 12 or 13


def number_verifier(
    *,
    column: str = "ground_truth",
    where: Literal["anywhere", "marked"] = "anywhere",
    tolerance: float = 0.0,
    name: str = "gsm8k",
) -> Verifier:
    r"""A verifier of numeric answers: 1 if the response's final number is the ground truth, else 0.

    The final number is the one in the last mark (``\boxed{}``, ``<answer>``, ``####``); without a
    mark the one after the last "the answer is"; without that the last number of the response.  A
    mark with several different numbers is a guess and scores 0, unless they form an equation,
    of which the last side counts; so is "the answer is 12 or 13", also with and, to, a dash or
    colon. Numbers are compared exactly: 0.5, 1/2, 50% and .50 are equal; units are ignored. A
    ground truth with six or more decimals is taken as rounded there.

    Args:
        column: dataset column with the ground truth, a number or text; of a GSM8K solution what
            follows ``####`` counts.
        where: ``"marked"`` looks at marks alone.
        tolerance: largest difference accepted, relative to the ground truth.
        name: of the verifier.

    Raises:
        ConfigError: an option does not fit.
    """
    if where not in ("anywhere", "marked"):
        raise ConfigError(f"where={where!r} must be 'anywhere' or 'marked'")
    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance={tolerance} must be at least 0 and below 1")

    check = partial(_check, marked_only=where == "marked", tolerance=tolerance, name=name)
    return Verifier(check, name=name, column=column)


def _check(text: str, truth: Any, *, marked_only: bool, tolerance: float, name: str) -> float:
    want = _truth(truth, name)
    found = final_number(text, marked_only=marked_only)
    return float(found is not None and same_number(found, want, tolerance))


def final_number(text: str, *, marked_only: bool = False) -> Number | None:
    """The number that a response ends on, or None."""
    marked = marked_answer(text)
    if marked is not None and len(_WORD.findall(marked[:PROSE_LETTERS])) < PROSE_WORDS:
        cleaned, numbers = _numbers(marked)
        values = _right_side(cleaned, numbers)
        return values[0] if len({(n.value, n.percent) for n in values}) == 1 else None
    if marked is not None:
        text = marked
    elif marked_only:
        return None
    stated = stated_answer(text)
    if stated is not None:
        cleaned, numbers = _numbers(stated)
        if numbers:
            first, *others = _right_side(cleaned, numbers)
            several = _JOINED.match(cleaned, first.end) and others
            return first if not several or others[0].value == first.value else None
    _, numbers = _numbers("\n" + text)
    return numbers[-1] if numbers else None


def same_number(found: Number, want: Number, tolerance: float = 0.0) -> bool:
    """Whether two numbers are equal; a percent sign may be left out or carried out."""
    slack = abs(want.value) * Fraction(tolerance)
    if want.decimals >= ROUNDED_FROM:
        slack = max(slack, Fraction(1, 2 * 10**want.decimals))
    values = [found.value]
    if found.percent != want.percent:
        values.append(found.value / 100 if found.percent else found.value * 100)
    return any(abs(value - want.value) <= slack for value in values)


def _numbers(text: str) -> tuple[str, list[Number]]:
    cleaned = _NEGATIVE.sub("-", clean(text))
    return cleaned, find_numbers(cleaned)


def _right_side(cleaned: str, numbers: list[Number]) -> list[Number]:
    """The numbers behind the last equals sign that has any behind it; all if there is none."""
    signs = cleaned.rfind("=", 0, numbers[-1].start + 1) if numbers else -1
    return [number for number in numbers if number.start > signs]


def _truth(truth: Any, name: str) -> Number:
    text = truth.rsplit("####", 1)[-1] if isinstance(truth, str) else _plain(truth)
    numbers = _numbers(text.strip())[1]
    if len(numbers) != 1:
        raise RewardError(
            f"verifier {name}: the ground truth {str(truth)[:80]!r} holds {len(numbers)} numbers;"
            " it must be one number, or text that ends in '#### <number>'"
        )
    return numbers[0]


def _plain(truth: Any) -> str:
    """A number as text; of a float the twelve digits that surely mean something."""
    if isinstance(truth, float):
        return format(Decimal(f"{truth:.12g}"), "f")
    return str(truth)


gsm8k = number_verifier()
