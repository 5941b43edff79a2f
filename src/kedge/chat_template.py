"""Renders chat messages by a tokenizer's template; neither can be trusted to be valid."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.records.errors import DataError

TOOLS, OPTIONS = "tools", "chat_template_kwargs"  # columns for the template


def template_options(row: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """What a row passes to the chat template: its ``tools`` and ``chat_template_kwargs``.

    Raises:
        DataError: they are not JSON schemas and a dict, or JSON text of them.
    """
    tools, options = (_read_json(row.get(name)) for name in (TOOLS, OPTIONS))
    if tools and not (isinstance(tools, list) and all(isinstance(t, Mapping) for t in tools)):
        _refuse(TOOLS, "a list of JSON schemas", tools, where)
    if options and not isinstance(options, Mapping):
        _refuse(OPTIONS, "a dict", options, where)
    return ({TOOLS: tools} if tools else {}) | dict(options or {})


def _read_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError):
        return value


def _refuse(column: str, wanted: str, value: Any, where: str) -> None:
    place = f"column {column!r}" + (where and f", {where}")
    raise DataError(
        f"{place}: the chat template reads this column, so it must hold {wanted}, or JSON text of"
        f" it, got {str(value)[:80]!r}; fix it, or rename the column"
    )


def generation_options(messages: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """How a conversation ends: with the header of an answer, or open if the answer has begun."""
    answered = bool(messages) and messages[-1]["role"] == "assistant"
    return {"add_generation_prompt": not answered, "continue_final_message": answered}


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
