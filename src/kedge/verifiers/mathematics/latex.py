r"""Normalizes LaTeX answers to a canonical form, with string operations only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_LETTERS = 1000  # a longer text is not an answer

ROW = "\N{SYMBOL FOR NEWLINE}"  # stands for the row break of a matrix
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_NAMES = (
    (r"\cfrac", r"\frac"), (r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\leq", r"\le"),
    (r"\geq", r"\ge"), (r"\neq", r"\ne"), (r"\lbrace", r"\{"), (r"\rbrace", r"\}"),
    ("bmatrix", "pmatrix"), ("Bmatrix", "pmatrix"), ("\\ ", " "), ("~", " "), ("**", "^"),
    (r"\%", "%"), ("{,}", ","), ("{:}", ":"), (r"\varnothing", r"\emptyset"),
    (",\\! ", ","), (",\\!", ","),
    ("\N{INFINITY}", r"\infty"), ("\N{GREEK SMALL LETTER PI}", r"\pi"),
    ("\N{SQUARE ROOT}", r"\sqrt"), ("\N{MULTIPLICATION SIGN}", r"\times"),
    ("\N{MIDDLE DOT}", r"\cdot"), ("\N{UNION}", r"\cup"), ("\N{ELEMENT OF}", r"\in"),
    ("\N{PLUS-MINUS SIGN}", r"\pm"), ("\N{SUPERSCRIPT TWO}", "^2"),
    ("\N{SUPERSCRIPT THREE}", "^3"), ("\N{MINUS SIGN}", "-"), ("\N{EN DASH}", "-"),
)  # fmt: skip
_DROP = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|q?quad)(?![a-zA-Z])"
    r"|\\[,!;:]|\\?\$|(?:\^\s?\{\s?\\circ\s?\}|\^\s?\\circ|\\degree)(?![a-zA-Z])|\N{DEGREE SIGN}"
)
_TEXT = re.compile(
    r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|operatorname)"
    r"\s?\{([^{}]*)\}"
)
_POWER = r"(?:\s?\^\s?(?:\{[0-9]\}|[0-9]))?"
_NO_UNIT = r"(?!(?:or|and|is|are|was|not|if|to|than|but)\b)"  # words of a sentence
_TEXT_UNIT = re.compile(rf"(?<=[^\s,(\[{{=])\s?{_TEXT.pattern}{_POWER}\s?\Z")
_WORD_UNIT = re.compile(
    r"\A([-+]?[0-9][0-9.,/]*)\s(?!(?:pi|sqrt)\b)"
    rf"(?:{_NO_UNIT}[A-Za-z]{{2,}}\.?{_POWER}\s?){{1,4}}\Z"
)
_SUBSTITUTIONS = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\frac\s?([0-9a-zA-Z])\s?([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s?([0-9a-zA-Z])\s?\{", r"\\frac{\1}{"),
        (r"\\frac\s?(\{[^{}]*\})\s?([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"\\sqrt\s?([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])\\?sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![0-9])\.(?=[0-9])", "0."),
    )
)
SEPARATORS = (",", ";", " and ", " or ")
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s?(?:\{\s?([0-9]{1,20})\s?\}|([0-9]))"
)
_TOKEN = re.compile(r"\\[{}]|\\cup(?![a-zA-Z])| and | or |[()\[\]{},;]")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_FLAT = re.compile(r"\\frac\{\s?(-?)\s?([0-9]+|[a-zA-Z]|\\[a-z]+)\s?\}\{\s?([0-9]+)\s?\}")
_PREFIX = re.compile(r"([a-zA-Z](?:\([a-zA-Z]\))?)\s?(?:=|\\in(?![a-zA-Z]))\s?(?=\S)")


def tidy(answer: str) -> str:
    r"""The answer in plain LaTeX: no delimiters, spacing commands, units, degrees or dollar signs.

    ``\dfrac`` and similar become ``\frac``, and arguments get braces.
    """
    text = " ".join(answer[: 2 * MAX_LETTERS].split())
    for start, end in _DELIMITERS:
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
            text = text[len(start) : -len(end)].strip()
    text = text.replace("\\\\", ROW)
    for old, new in _NAMES:
        text = text.replace(old, new)
    text = " ".join(_DROP.sub("", text).split()).rstrip(" .;")
    text = _TEXT.sub(r"\1", _TEXT_UNIT.sub("", text)).strip()
    text = _WORD_UNIT.sub(r"\1", text)
    text = _REPEATING.sub(_repeating, text)
    for pattern, new in _SUBSTITUTIONS:
        text = pattern.sub(new, text)
    return text.strip()


def _repeating(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as a fraction: (all digits - non-repeating digits) / 90."""
    whole, once, again = match[1], match[2], match[3] or match[4]
    value = Fraction(
        int(whole + once + again) - int(whole + once or "0"),
        10 ** len(once) * (10 ** len(again) - 1),
    )
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def flat(tidied: str) -> str:
    r"""A tidied answer with simple fractions as ``a/b`` and no thousands separators."""
    text = re.sub(r"([_^])\s?\{\s?([0-9a-zA-Z]+)\s?\}", r"\1\2", tidied)
    text = _FLAT.sub(_fraction, text)
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def squeezed(tidied: str) -> str:
    """A flat answer without whitespace."""
    return "".join(flat(tidied).split())


def prefix(tidied: str) -> tuple[str, str]:
    r"""The variable left of ``=`` or ``\in`` ("" if it is not a single one), and the rest."""
    match = _PREFIX.match(tidied)
    rest = tidied[match.end() :] if match else ""
    if match is None or "=" in rest:
        return "", tidied
    return match[1], rest


def bare(tidied: str) -> str:
    """A tidied answer without parentheses around a single value."""
    while (
        tidied.startswith("(")
        and _closes_last(tidied)
        and len(_split(tidied[1:-1], SEPARATORS)) == 1
    ):
        tidied = tidied[1:-1].strip()
    return tidied


def _fraction(match: re.Match[str]) -> str:
    before = match.string[: match.start()].rstrip()[-1:]
    value = f"{match[1]}{match[2]}/{match[3]}"
    return f" {value}" if before.isdigit() else value


@dataclass(frozen=True, slots=True)
class Group:
    """An answer with several parts.

    Attributes:
        kind: opening and closing bracket, ``"set"`` for a list or set, ``"union"``, or ``"matrix"``
            followed by the shape.
        parts: the tidied parts.
    """

    kind: str
    parts: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        """Whether the order of the parts matters."""
        return self.kind not in ("set", "union")


def group(tidied: str) -> Group | None:
    """The parts of a tuple, interval, set, list, union or matrix; None for a single value."""
    text = tidied.strip()
    matrix = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    if matrix:
        rows = [row.split("&") for row in matrix[1].split(ROW) if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        return Group(f"matrix{shape}", tuple(cell.strip() for row in rows for cell in row))
    union = _split(text, (r"\cup",))
    if len(union) > 1:
        return Group("union", tuple(union))
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return Group("set", tuple(_expanded(_split(text[2:-2].strip(), (",",)))))
    listed = _split(text, SEPARATORS)
    if len(listed) == 1 and r"\pm" in text and text.count(r"\pm") == 1:
        listed = [text.replace(r"\pm", "+"), text.replace(r"\pm", "-")]
    if len(listed) > 1:
        return Group("set", tuple(_expanded(listed)))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_last(text):
        inner = _split(text[1:-1], (",",))
        return Group(text[0] + text[-1], tuple(inner)) if len(inner) > 1 else None
    return None


def _expanded(parts: list[str]) -> Iterator[str]:
    for part in parts:
        if part.count(r"\pm") == 1:
            yield part.replace(r"\pm", "+").strip()
            yield part.replace(r"\pm", "-").strip()
        else:
            yield part


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """The parts between separators outside all brackets."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in ("(", "[", "{", r"\{"):
            depth += 1
        elif token[0] in (")", "]", "}", r"\}"):
            depth -= 1
        elif depth == 0 and token[0] in separators:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return [piece for piece in parts if piece] or [text]


def _closes_last(text: str) -> bool:
    """Whether the first bracket closes at the very end."""
    depth = 0
    for token in re.finditer(r"[()\[\]]", text):
        depth += 1 if token[0] in "([" else -1
        if depth == 0:
            return token.end() == len(text)
    return False
