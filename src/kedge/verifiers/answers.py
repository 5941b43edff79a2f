"""Locates the final answer in a response."""

from __future__ import annotations

import re

_PHRASE = re.compile(
    r"\b(?:answer|result|solution)\s{0,3}(?:is|are|equals|=|:)[\s:*]{0,5}(?:equal\s{1,3}to\b)?",
    re.IGNORECASE,
)
_BRACES = re.compile(r"\\f?boxed\s{0,5}\{|\\[{}\\]|[{}]")
_BARE_BOX = re.compile(r"\\f?boxed\s{1,5}([^\s{}$]{1,50})")
_HASHES = re.compile(r"####[ #]*([^\n]+)")
_HEADING = re.compile(r"[^0-9A-Za-z\\]*[A-Za-z]")


def marked_answer(text: str) -> str | None:
    r"""The content of the last explicit answer mark in a response, or None without a mark.

    Marks are ``\boxed{...}`` (and ``\fbox``), ``<answer>...</answer>``, and ``#### ...`` to the
    end of the line (unless a word follows: that is a heading).  Of nested marks the innermost
    counts.  A mark that is never closed is ignored.
    """
    marks = [m for m in (_last_box(text), _last_tag(text), _last_hashes(text)) if m is not None]
    return max(marks)[1] if marks else None


def stated_answer(text: str) -> str | None:
    """The text after the last "the answer is" (or result, solution), to the end of the line."""
    ends = [match.end() for match in _PHRASE.finditer(text)]
    return text[ends[-1] :].split("\n", 1)[0].strip() or None if ends else None


def _last_box(text: str) -> tuple[int, str] | None:
    text = text.replace("\\fbox", "\\fboxed")
    last: tuple[int, int, int] | None = None
    open_braces: list[tuple[int, int] | None] = []  # start of each box, and of its content
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                last = max(last or (-1, 0, 0), (*box, token.start()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_braces.append(token.span())
    answer = None if last is None else (last[0], text[last[1] : last[2]].strip())
    for bare in _BARE_BOX.finditer(text, last[0] if last else 0):
        answer = bare.start(), bare[1].rstrip(".,;")
    return answer


def _last_tag(text: str) -> tuple[int, str] | None:
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(close, 0))
    return None if start < 0 else (start, text[start + len("<answer>") : close].strip())


def _last_hashes(text: str) -> tuple[int, str] | None:
    marks = [(m.start(), m[1].strip()) for m in _HASHES.finditer(text) if not _HEADING.match(m[1])]
    return marks[-1] if marks and marks[-1][1] else None
