r"""Numeric answers to word problems (GSM8K and similar), and exact parsing of numbers.

Understood: signs (also the Unicode minus), currency signs, thousands separators (``1,080``,
``1{,}080``, ``10,\!080``, ``1 080`` with a thin space), decimals, powers of ten, percent signs,
``a/b``, ``\frac{a}{b}``, mixed numbers and vulgar fractions.  Not understood: numbers in words.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from kedge.records.errors import ConfigError, RewardError
from kedge.verifiers.base import Verifier, conclusion, marked_answer, stated_answer

MAX_DIGITS = 100  # per number; longer ones are slow to convert and no answers

_CHARACTERS = str.maketrans(
    {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | {"\uff0b": "+", "\uff0c": ",", "\uff0e": ".", "\uff0f": "/", "\u2044": "/", "\uff05": "%"}
)
_VULGAR = re.compile(r"([0-9]?)\s?([¼-¾⅐-⅞])")
_TOO_LONG = re.compile(rf"[0-9]{{{MAX_DIGITS + 1},}}")
_GROUP = r"(?:\{,\}|,(?:\\! ?)?|\\,|\\! ?|[\u2009\u202f\u00a0])"
_DEGREES = re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![a-zA-Z]))")
_CURRENCY = re.compile(r"(?:Rs|USD|EUR|GBP)\Z")
_FRAC = re.compile(
    r"\\[dtc]?frac\s?(?:\{\s?([0-9]{1,99})\s?\}|([0-9]))\s?(?:\{\s?([0-9]{1,99})\s?\}|([0-9]))"
)
_NUMBER = re.compile(
    r"(?:(?P<sign>[-+])(?P<gap> ?))?(?:(?:\\?\$|[€£¥]) ?)?(?P<inner>[-+])?"
    rf"(?:(?P<whole>[0-9]{{1,3}}(?:{_GROUP}[0-9]{{3}})+(?![0-9])|[0-9]+)(?P<tail>\.[0-9]+)?"
    r"|(?P<point>\.[0-9]+))"
    r"(?:(?P<mixed> [0-9]+/[0-9]+(?![0-9/]))|(?P<slash> ?/ ?[0-9]+(?![0-9/]|\.[0-9]))"
    r"|[eE](?P<power>[-+]?[0-9]{1,3})(?![0-9A-Za-z])"
    r"|\s?(?:\\times|\\cdot|[\u00d7*x])\s?10\s?\^\s?(?:\{\s?(?P<braced>[-+]?[0-9]{1,3})\s?\}"
    r"|(?P<times>[-+]?[0-9]{1,3})(?![0-9])))?"
    r"(?P<percent> ?\\?%)?"
)
ROUNDED_FROM = 6  # decimals from which a ground truth counts as rounded
PROSE_WORDS, PROSE_LETTERS = 4, 300  # limits beyond which a mark is a sentence
_NEGATIVE = re.compile(r"(?:\bnegative |(?:\A|(?<=\bis ))minus )(?=[$€£]?[0-9])", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]{2,}")
_JOINED = re.compile(r"\s?(?:or|and|to|-|:|/)\s?[-+]?(?:(?:\\?\$|[€£¥])\s?)?\.?[0-9]")  # 12 or 13


@dataclass(frozen=True, slots=True)
class Number:
    """A number found in a text."""

    value: Fraction  # exact, ignoring a percent sign
    percent: bool  # whether a percent sign followed
    decimals: int  # digits after the decimal point, as written
    start: int  # position of its first character in the text
    end: int  # position after its last character


def clean(text: str) -> str:
    """Unify minus signs, digits and fractions, and remove overlong numbers."""
    text = _DEGREES.sub("", text.translate(_CHARACTERS))
    text = _VULGAR.sub(lambda m: f"{m[1]} {unicodedata.normalize('NFKC', m[2])}".lstrip(), text)
    text = text.replace("\N{FRACTION SLASH}", "/")
    text = _FRAC.sub(_flat_fraction, text)
    return _TOO_LONG.sub("\N{REPLACEMENT CHARACTER}", text)


def find_numbers(text: str) -> list[Number]:
    """All numbers of a text that ``clean`` returned, in order, without exponents and indices."""
    return [n for match in _NUMBER.finditer(text) if (n := _read(text, match)) is not None]


def one_number(text: str) -> Number | None:
    """The number if it is the whole text, else None."""
    text = clean(text).strip()
    match = _NUMBER.fullmatch(text)
    return None if match is None else _read(text, match)


def _flat_fraction(match: re.Match[str]) -> str:
    before = match.string[match.start() - 1 : match.start()]
    flat = f"{match[1] or match[2]}/{match[3] or match[4]}"
    return f" {flat}" if before.isdigit() else flat


def _read(text: str, match: re.Match[str]) -> Number | None:
    start, end = match.span()
    if text[end : end + 1] in ("^", "_") or _is_index(text, start):
        return None
    whole = re.sub(r"[^0-9]", "", match["whole"] or "")
    decimals = (match["tail"] or match["point"] or ".")[1:]
    if len(whole) > MAX_DIGITS or (decimals and match["mixed"]):
        return None
    value = Fraction(f"{whole or 0}.{decimals or 0}")
    power = int(match["power"] or match["braced"] or match["times"] or 0)
    value *= Fraction(10) ** power
    try:
        if match["mixed"]:
            value += Fraction(match["mixed"].strip())
        if match["slash"]:
            value /= Fraction(match["slash"].replace("/", "").strip())
    except ZeroDivisionError:
        return None
    if (match["inner"] == "-") != (match["sign"] == "-" and _is_sign(text, match)):
        value = -value
    return Number(value, match["percent"] is not None, len(decimals), start, end)


def _is_sign(text: str, match: re.Match[str]) -> bool:
    """Whether a leading minus is a sign, not an operator, range or bullet."""
    before = text[max(0, match.start() - 20) : match.start()]
    if not match["gap"]:
        return not (before[-1:].isalnum() or before[-1:] in (")", "]", "}", "%"))
    return not text[: match.start()] or before.rstrip(" ")[-1:] in ("=", "(", "{", ":")


def _is_index(text: str, start: int) -> bool:
    """Whether digits are part of a name or an exponent, as in H2O, m2, x_1 or x^{2}."""
    before = text[max(0, start - 3) : start]
    if before.endswith(("^", "_", "^{", "_{")):
        return True
    glued = text[start].isdigit() and before[-1:].isascii() and before[-1:].isalpha()
    return glued and not _CURRENCY.search(before)


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
        name: name of the verifier.

    Raises:
        ConfigError: an option is out of range.
    """
    if where not in ("anywhere", "marked"):
        raise ConfigError(f"where={where!r} must be 'anywhere' or 'marked'")
    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance={tolerance} must be at least 0 and below 1")

    check = partial(_check, marked_only=where == "marked", tolerance=tolerance)
    return Verifier(check, name=name, column=column)


def _check(text: str, truth: Any, *, marked_only: bool, tolerance: float) -> float:
    want = _read_truth(truth)
    answer = final_number(text, marked_only=marked_only)
    return float(answer is not None and same_number(answer, want, tolerance))


def final_number(text: str, *, marked_only: bool = False) -> Number | None:
    """The final number of a response, after its reasoning, or None."""
    text = conclusion(text)
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
    """The numbers after the last equals sign that has any; all if there is none."""
    signs = cleaned.rfind("=", 0, numbers[-1].start + 1) if numbers else -1
    return [number for number in numbers if number.start > signs]


def _read_truth(truth: Any) -> Number:
    text = str(truth).rsplit("####", 1)[-1]
    if isinstance(truth, float):
        text = format(Decimal(f"{truth:.12g}"), "f")
    numbers = _numbers(text.strip())[1]
    if len(numbers) != 1:
        raise RewardError(
            "the ground truth must be one number, or text that ends in '#### <number>', got"
            f" {len(numbers)} numbers in {str(truth)[:80]!r}"
        )
    return numbers[0]


gsm8k = number_verifier()
