"""Remembers values of secret fields and flags, and blanks them in files, reports and messages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

BLANK = "..."
LONGEST = 4_000  # characters of a redacted message
SHORTEST, FEWEST = 8, 4  # characters, and distinct ones, in a value to blank
_NAME = re.compile(
    r"(?:.*[_.-])?(?:(?:hub|auth|access|api|bearer|hf|refresh)[_-]?token|password|passwd|secret"
    r"|(?:api|access|secret|private)[_-]?key|authorization|credentials?)|token",
    re.IGNORECASE,
)
# Names in mappings and URLs that the user makes up, where `key` and `pass` are not options of ours.
_FREE_NAME = re.compile(
    r"(?:.*[_.-])?(?:key|token|pass|pwd|passphrase|password|passwd|secret|auth|authorization"
    r"|bearer|cookie|sig|signature|credentials?)",
    re.IGNORECASE,
)
# Mappings that the user makes up.
_FREE = re.compile(r".*(?:kwargs|_args|headers)", re.IGNORECASE)
_LOGIN = re.compile(r"(\w://)[^/\s@'\"]+@")
_QUERY = re.compile(r"([?&]([\w.-]+)=)([^&\s#'\"]+)")
_FIELD = re.compile(r"""(["']?)([\w.-]+)\1\s*[:=]\s*(?:"([^"]*)"|'([^']*)'|([^\s"',}&]+))""")
# What services issue, under whatever name, and the word after `Bearer`.
_ISSUED = re.compile(
    r"\b(?:sk-(?=\S*\d)[\w-]{16,}|(?:hf_|ghp_)[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|(?:glpat-|xox[abp]-)[\w-]{12,}|AKIA[A-Z0-9]{12,})|(?<=bearer )[^\s\"']{8,}",
    re.IGNORECASE,
)

_known: set[str] = set()


def is_secret(name: object, *, free: bool = False) -> bool:
    """Whether a field, flag or key of this name holds a secret; ``free``: the user's own name."""
    pattern = _FREE_NAME if free else _NAME
    return isinstance(name, str) and pattern.fullmatch(name.lstrip("-")) is not None


def remember(value: object, name: str | None = None) -> None:
    """Remember a secret, to blank it from now on.

    Under a ``name`` that only might be a secret's, a plain word such as ``difficulty`` is none.
    """
    if isinstance(value, str) and name is not None and not is_secret(name) and value.isalpha():
        return
    if isinstance(value, str) and len(value) >= SHORTEST and len(set(value)) >= FEWEST:
        _known.add(value)


def redact(value: Any, blank: Callable[[Any], str] = lambda _: BLANK, *, free: bool = False) -> Any:
    """Blank secrets in plain data: values of secret fields, in URLs, issued and remembered ones.

    ``blank`` returns the replacement for the value of a secret field.
    """
    if isinstance(value, str):
        text = _ISSUED.sub(BLANK, _LOGIN.sub(rf"\1{BLANK}@", value))
        text = _QUERY.sub(lambda m: m[1] + BLANK if is_secret(m[2], free=True) else m[0], text)
        for secret in _known:
            text = text.replace(secret, BLANK)
        return text
    if isinstance(value, Mapping):
        hidden = {name for name, item in value.items() if item and is_secret(name, free=free)}
        for name in hidden:
            remember(value[name], name)
        return {
            name: blank(item)
            if name in hidden
            else redact(
                _parsed(item) if _FREE.fullmatch(str(name)) else item,
                blank,
                free=free or _FREE.fullmatch(str(name)) is not None,
            )
            for name, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(redact(item, blank, free=free) for item in value)
    return value


def _parsed(item: Any) -> Any:
    """The mapping that JSON text stands for, as the option it is given for reads it."""
    if not (isinstance(item, str) and item.lstrip().startswith("{")):
        return item
    try:
        return json.loads(item)
    except (ValueError, RecursionError):
        return item


def digest(value: Any) -> str:
    """A hash that replaces a secret when two runs are compared; a digest is returned as it is."""
    if isinstance(value, str) and value.startswith("sha256:"):
        return value
    text = json.dumps(value, sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


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
    if not is_secret(match[2], free=True):
        return match[0]
    group = match.lastindex or 0  # of three ways to write a value
    remember(match[group], match[2])
    start, end = (x - match.start() for x in match.span(group))
    return match[0][:start] + BLANK + match[0][end:]


def clean(message: object) -> object:
    """Remove secrets and control codes from a message, and limit its length."""
    if not isinstance(message, str):
        return message
    if len(message) > LONGEST:
        message = f"{message[: LONGEST - 500]} ... ({len(message)} characters) {message[-400:]}"
    text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in message)
    return redact(text)
