"""Tool calls in the text of a response, in the format of the model's chat template.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Qwen, Hermes
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]          or NAME[ARGS]{...}
    llama     <|python_tag|>{"name": ..., "parameters": {...}}              or the JSON alone

A call that cannot be read becomes a ``ToolCall`` with an error for the policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kedge.types import ToolCall

Parser = Callable[[str], Sequence[ToolCall]]

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{)")
_decoder = json.JSONDecoder()


def tool_parser(chat_template: object) -> Parser:
    """The parser of a chat template; one that tries all formats if it has none of them."""
    text = json.dumps(chat_template) if isinstance(chat_template, Mapping) else str(chat_template)
    for marker, parser in _BY_MARKER.items():
        if marker in text:
            return parser
    return parse_any


def parse_any(text: str) -> Sequence[ToolCall]:
    """Calls in the first format that the text has."""
    for marker, parser in _BY_MARKER.items():
        if marker in text:
            return parser(text)
    return parse_llama(text)


def parse_hermes(text: str) -> Sequence[ToolCall]:
    """Calls in ``<tool_call>`` tags."""
    return [_read_json(match[1]) for match in _HERMES.finditer(text)]


def parse_mistral(text: str) -> Sequence[ToolCall]:
    """Calls after ``[TOOL_CALLS]``: a list, or one name and arguments per marker."""
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = _MISTRAL_NAMED.match(part)
        if named is not None:
            arguments, error = _first_value(part[named.end() :])
            calls.append(_call(named[1], arguments, error))
            continue
        value, error = _first_value(part)
        if isinstance(value, list):
            calls += [_from_value(item, "") for item in value]
        else:
            calls.append(_from_value(value, error))
    return calls


def parse_llama(text: str) -> Sequence[ToolCall]:
    """JSON after ``<|python_tag|>``, or a response that is nothing but JSON with a name."""
    tagged = "<|python_tag|>" in text
    body = text.rpartition("<|python_tag|>")[2].strip()
    if not tagged and not (body.startswith("{") and '"name"' in body):
        return []
    calls = []
    while body:
        value, error = _first_value(body)
        calls.append(_from_value(value, error))
        if error:
            break
        body = body[_decoder.raw_decode(body)[1] :].lstrip(" ;\n")
    return calls


_BY_MARKER: dict[str, Parser] = {
    "<tool_call>": parse_hermes,
    "[TOOL_CALLS]": parse_mistral,
    "<|python_tag|>": parse_llama,
    '"parameters":': parse_llama,
}


def _read_json(text: str) -> ToolCall:
    value, error = _first_value(text)
    return _from_value(value, error)


def _first_value(text: str) -> tuple[Any, str]:
    """The JSON value that the text begins with, or an error."""
    try:
        return _decoder.raw_decode(text.strip())[0], ""
    except (ValueError, RecursionError) as error:
        return None, f"the tool call is not valid JSON: {error}"


def _from_value(value: Any, error: str) -> ToolCall:
    if error:
        return ToolCall(name="", error=error)
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall(name="", error='a tool call must be an object with "name" and "arguments"')
    return _call(value["name"], value.get("arguments", value.get("parameters", {})), "")


def _call(name: str, arguments: Any, error: str) -> ToolCall:
    if isinstance(arguments, str):  # as OpenAI's format has them
        arguments, error = _first_value(arguments)
    if not error and not isinstance(arguments, Mapping):
        error = f"the arguments of {name} must be a JSON object"
    if error:
        return ToolCall(name=name, error=error)
    return ToolCall(name=name, arguments=arguments)
