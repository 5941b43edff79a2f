"""Remembers values of secret fields and flags, and blanks them in files, reports and messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

BLANK = "..."
LONGEST = 4_000  # characters of a redacted message
SHORTEST, FEWEST = 8, 4  # characters, and distinct ones, in a value to blank
_NAME = re.compile(
    r"(?:.*[_.-])?(?:(?:hub|auth|access|api|bearer|hf|refresh)[_-]?token|password|passwd|secret"
    r"|(?:api|access|secret|private)[_-]?key|authorization|credentials?)|token",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(\w://)[^/\s@'\"]*:[^/\s@'\"]*@")
_QUERY = re.compile(r"([?&]([\w.-]+)=)([^&\s#'\"]+)")
_FIELD = re.compile(r"""(["']?)([\w.-]+)\1\s*[:=]\s*["']?([^\s"',}&]+)""")

_known: set[str] = set()


def is_secret(name: object) -> bool:
    """Whether a field, flag or key of this name holds a secret."""
    return isinstance(name, str) and _NAME.fullmatch(name.lstrip("-")) is not None


def remember(value: object) -> None:
    """Remember a secret, to blank it from now on."""
    if isinstance(value, str) and len(value) >= SHORTEST and len(set(value)) >= FEWEST:
        _known.add(value)


def redact(value: Any) -> Any:
    """Blank secrets in plain data: values of secret fields, in URLs, and remembered ones."""
    if isinstance(value, str):
        text = _LOGIN.sub(rf"\1{BLANK}@", value)
        text = _QUERY.sub(
            lambda m: m[1] + BLANK if is_secret(m[2]) or m[2] == "key" else m[0], text
        )
        for secret in _known:
            text = text.replace(secret, BLANK)
        return text
    if isinstance(value, Mapping):
        for name, item in value.items():
            if is_secret(name):
                remember(item)
        return {
            name: BLANK if item and is_secret(name) else redact(item)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(map(redact, value)) if type(value) in (list, tuple) else value
    return value


def redact_words(words: Iterable[str]) -> list[str]:
    """Blank the values of secret flags, and secrets in JSON, in a command line."""
    shown, hide = [], False
    for word in words:
        flag = word.startswith("--")
        name, equals, value = word.partition("=")
        if flag and is_secret(name):
            remember(value)
            hide = not equals
            shown.append(name + (f"={BLANK}" if equals else ""))
        elif hide and not flag:
            remember(word)
            shown.append(BLANK)
            hide = False
        else:
            shown.append(_FIELD.sub(_blank_field, word) if "{" in word else word)
    return [redact(word) for word in shown]


def _blank_field(match: re.Match[str]) -> str:
    if not is_secret(match[2]):
        return match[0]
    remember(match[3])
    return match[0][: match.start(3) - match.start()] + BLANK


def clean(message: object) -> object:
    """Remove secrets and control codes from a message, and limit its length."""
    if not isinstance(message, str):
        return message
    if len(message) > LONGEST:
        message = f"{message[: LONGEST - 500]} ... ({len(message)} characters) {message[-400:]}"
    text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in message)
    return redact(text)
