"""Renders chat messages by a tokenizer's template; neither can be trusted to be valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.errors import DataError


def without_none(value: Any) -> Any:
    """``value`` without the None that datasets fill in where rows have different keys."""
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, where: str = "", **options: Any
) -> str:
    """The text of one conversation; ``where`` names its source in error messages."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except ImportError:  # raised by jinja2; the message says what to install
        raise
    except Exception as error:
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line else ""
        raise DataError(
            f"{where or 'chat messages'}: the chat template of"
            f" {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'!r}"
            f" (chat_template.jinja or tokenizer_config.json{place}) raised"
            f" {type(error).__name__}: {error}; fix the template or the messages"
            f" {str(list(messages))[:200]}"
        ) from error
