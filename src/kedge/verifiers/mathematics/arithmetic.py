"""Numeric answers to word problems (GSM8K and similar)."""

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

ROUNDED_FROM = 6  # a ground truth with this many decimals counts as rounded
PROSE_WORDS, PROSE_LETTERS = 4, 300  # a mark with this many words is a sentence
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

    The final number is the one in the last mark (``\boxed{}``, ``<answer>``, ``####``), else the
    one after the last "the answer is", else the last number of the response.  A mark with several
    different numbers is a guess and scores 0, as does "the answer is 12 or 13" (also with and, to,
    a dash or colon); of an equation the last side counts.  Numbers are compared exactly: 0.5, 1/2,
    50% and .50 are equal; units are ignored.  A ground truth with six or more decimals counts as
    rounded to them.

    Args:
        column: dataset column with the ground truth, a number or text; in a GSM8K solution, the
            number after ``####``.
        where: ``"marked"`` accepts only numbers in marks.
        tolerance: largest difference accepted, relative to the ground truth.
        name: of the verifier.

    Raises:
        ConfigError: an option is out of range.
    """
    if where not in ("anywhere", "marked"):
        raise ConfigError(f"where={where!r} must be 'anywhere' or 'marked'")
    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance={tolerance} must be at least 0 and below 1")

    check = partial(_check, marked_only=where == "marked", tolerance=tolerance, name=name)
    return Verifier(check, name=name, column=column)


def _check(text: str, truth: Any, *, marked_only: bool, tolerance: float, name: str) -> float:
    want = _truth(truth, name)
    answer = final_number(text, marked_only=marked_only)
    return float(answer is not None and same_number(answer, want, tolerance))


def final_number(text: str, *, marked_only: bool = False) -> Number | None:
    """The final number of a response, or None."""
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


def same_number(answer: Number, want: Number, tolerance: float = 0.0) -> bool:
    """Whether two numbers are equal; 50, 50% and 0.5 match where one side has a percent sign."""
    slack = abs(want.value) * Fraction(tolerance)
    if want.decimals >= ROUNDED_FROM:
        slack = max(slack, Fraction(1, 2 * 10**want.decimals))
    values = [answer.value]
    if answer.percent != want.percent:
        values.append(answer.value / 100 if answer.percent else answer.value * 100)
    return any(abs(value - want.value) <= slack for value in values)


def _numbers(text: str) -> tuple[str, list[Number]]:
    cleaned = _NEGATIVE.sub("-", clean(text))
    return cleaned, find_numbers(cleaned)


def _right_side(cleaned: str, numbers: list[Number]) -> list[Number]:
    """The numbers after the last equals sign that is followed by any; all without one."""
    signs = cleaned.rfind("=", 0, numbers[-1].start + 1) if numbers else -1
    return [number for number in numbers if number.start > signs]


def _truth(truth: Any, name: str) -> Number:
    text = truth.rsplit("####", 1)[-1] if isinstance(truth, str) else _plain(truth)
    numbers = _numbers(text.strip())[1]
    if len(numbers) != 1:
        raise RewardError(
            f"verifier {name}: the ground truth must be one number, or text that ends in"
            f" '#### <number>', got {len(numbers)} numbers in {str(truth)[:80]!r}"
        )
    return numbers[0]


def _plain(truth: Any) -> str:
    """A number as text; floats are rounded to twelve significant digits."""
    if isinstance(truth, float):
        return format(Decimal(f"{truth:.12g}"), "f")
    return str(truth)


gsm8k = number_verifier()
