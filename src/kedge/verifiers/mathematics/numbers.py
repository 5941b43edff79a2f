r"""Parses numbers as people and models write them, exactly.

Understood: signs (also the Unicode minus), currency signs, thousands separators (``1,080``,
``1{,}080``, ``10,\!080``, ``1 080`` with a thin space), decimals, powers of ten, percent signs,
``a/b``, ``\frac{a}{b}``, mixed numbers and vulgar fractions.  Not understood: numbers in words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 100  # per number; longer ones are not answers and slow to convert

_CHARACTERS = str.maketrans(
    {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | {"\uff0b": "+", "\uff0c": ",", "\uff0e": ".", "\uff0f": "/", "\u2044": "/", "\uff05": "%"}
)
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5",
    "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8",
    "⅝": "5/8", "⅞": "7/8", "⅑": "1/9", "⅒": "1/10",
}  # fmt: skip
_VULGAR_SIGN = re.compile(f"([0-9])?\\s?([{''.join(_VULGAR)}])")
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


@dataclass(frozen=True, slots=True)
class Number:
    """A number found in a text.

    Attributes:
        value: exact, ignoring a percent sign.
        percent: whether a percent sign followed.
        decimals: digits after the decimal point, as written.
        start: where it begins in the text that was searched.
        end: where it ends.
    """

    value: Fraction
    percent: bool
    decimals: int
    start: int
    end: int


def clean(text: str) -> str:
    """The text with unified minus signs, digits and fractions, and without overlong numbers."""
    text = _DEGREES.sub("", text.translate(_CHARACTERS))
    text = _VULGAR_SIGN.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{_VULGAR[m[2]]}", text)
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
    if text[start - 1 : start] in ("^", "_") or text[start - 2 : start] in ("^{", "_{"):
        return None
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
    """Whether digits are part of a name, as in H2O, m2 or x1."""
    before = text[max(0, start - 3) : start]
    glued = text[start].isdigit() and before[-1:].isascii() and before[-1:].isalpha()
    return glued and not _CURRENCY.search(before)
