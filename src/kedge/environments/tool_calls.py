"""Tool calls and reasoning in the text of a response, in the format of the model's chat template.

A call that cannot be read becomes a ``ToolCall`` with an error for the policy.  Calls within the
reasoning are not calls.  ``docs/reference/tool-calls.md`` has the table.
"""

# ruff: noqa: RUF001  (DeepSeek's markers have bars of another width)

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kedge.records.types import ToolCall

Parser = Callable[[str], Sequence[ToolCall]]

REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_BLOCK = re.compile(  # or an end without a beginning; that of gpt-oss ends other messages, too
    "|".join(
        [rf"{re.escape(begin)}(.*?)(?:{re.escape(end)}|\Z)" for begin, end in REASONING]
        + [re.escape(end) for _, end in REASONING if end != "<|end|>"]
    ),
    re.DOTALL,
)
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of messages, by template
_END = "\0"  # marks the end of a response for that parser
_DECODER = json.JSONDecoder()
_CUT_OFF = "the tool call, or an argument of it, has no end"
_PYTHON = {"True": True, "False": False, "None": None}
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
# The time of a pattern is linear in the text: a name excludes "<", where the next mark may begin,
# and values are looked for up to the last end.
_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_INVOKED = re.compile(
    r'<(?:[^\s<>]*[:｜])?parameter name="([^"]+)"[^<>]*>(.*?)</(?:[^\s<>]*[:｜])?parameter>',
    re.DOTALL,
)
_ENDS = {
    _PARAMETER: re.compile("</parameter>"),
    _ARGUMENT: re.compile("</arg_value>"),
    _INVOKED: re.compile(r"</(?:[^\s<>]*[:｜])?parameter>"),
}
_BETWEEN_CALLS = re.compile(r"[ ;\n]*")
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)(?:\s*\[CALL_ID\]\w*)?(?:\s*\[ARGS\])?(?=\s*\{)")


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Split a response with special tokens into leading reasoning, and the rest.

    ``opened``: the generation prompt begins the reasoning.
    """
    for begin, end in REASONING:
        before, found, rest = text.partition(begin)
        if found and not before.strip():
            reasoning, _, answer = rest.partition(end)
            return reasoning.strip(), answer
        if opened and end in text:
            reasoning, _, answer = text.partition(end)
            return reasoning.strip(), answer
    return (text.strip(), "") if opened else ("", text)


def reasoning_blocks(text: str) -> list[str]:
    """Each reasoning in a conversation with special tokens, without blanks; perhaps empty."""
    blocks = ("".join(filter(None, match.groups())) for match in _BLOCK.finditer(text))
    return ["".join(block.split()) for block in blocks]


def tool_parser(chat_template: object) -> Parser:
    """The parser for a chat template's format; without a known format, tries all."""
    text = json.dumps(chat_template) if isinstance(chat_template, Mapping) else str(chat_template)
    return _find_parser(text, parse_any)


def parse_any(text: str) -> Sequence[ToolCall]:
    """Parse calls in the first format found in the text."""
    return _find_parser(text, parse_llama)(text)


def read_by_template(tokenizer: Any, prompt: str, text: str) -> tuple[str, str, list[ToolCall]]:
    """Reasoning, answer and calls in a response, read by the tokenizer's ``response_template``.

    That of transformers returns a call that was cut off as if it were whole, and raises if one call
    cannot be read; both become errors of the call (``docs/adr/0022-response-templates.md``).

    Args:
        tokenizer: of transformers, with a ``response_template``.
        prompt: the text before the response, which may begin the reasoning.
        text: the response with special tokens and the stop token.
    """
    events: list[Mapping[str, Any]] = []
    problem = ""
    try:
        parser = tokenizer.get_response_parser(prefix=prompt)
        events += parser.feed(text + _END)
        events += parser.finalize()[1]
    except Exception as error:  # of the user's patterns, or of a call
        problem = f"the tool call cannot be read: {error}"
    texts = dict.fromkeys((*REASONING_FIELDS, "content", "tool_calls"), "")
    calls: list[ToolCall] = []
    for event in events:
        field, kind = event["field"], event["type"]
        if kind == "region_chunk":
            texts[field] = texts.get(field, "") + event["text"]
        elif field == "tool_calls" and kind == "region_open":
            texts[field] = ""
        elif field == "tool_calls":
            whole = _from_template(event["value"])
            if any(_END in texts[field] + call.name for call in whole):  # nothing has closed it
                whole, problem = [], _CUT_OFF
            calls += whole
    if problem:
        calls.append(ToolCall(name="", error=problem))
    reasoning = "".join(texts[field] for field in REASONING_FIELDS)
    answer = texts["content"] if events else text
    return reasoning.replace(_END, "").strip(), answer.replace(_END, ""), calls


def _from_template(value: Any) -> list[ToolCall]:
    """Calls of transformers' parser, whose formats may leave all arguments as text."""
    calls = [_from_value(item, "") for item in (value if isinstance(value, list) else [value])]
    for i, call in enumerate(calls):
        texts = {key: text for key, text in call.arguments.items() if isinstance(text, str)}
        typed = {key: _json_or_text(text) for key, text in texts.items()}
        calls[i] = replace(call, arguments={**call.arguments, **typed}, texts=texts)
    return calls


def _find_parser(text: str, default: Parser) -> Parser:
    return next((parser for marker, parser in _BY_MARKER.items() if marker in text), default)


def parse_tagged(text: str) -> Sequence[ToolCall]:
    """Calls in ``<tool_call>`` tags: JSON (Qwen 2.5 and 3, Hermes), or XML.

    XML with ``<function=name><parameter=key>`` is that of Qwen3-Coder, Qwen 3.5 and Nemotron 3, a
    name with ``<arg_key>`` that of GLM.
    """
    bodies = _TAGGED.findall(text)
    if not bodies and "<function=" in text:  # Qwen3-Coder sometimes omits the tag
        bodies = [text[text.index("<function=") :]]
    return [call for body in bodies for call in _from_tag(body)]


def _from_tag(body: str) -> list[ToolCall]:
    for begin, end in (("<parameter=", "</parameter>"), ("<arg_key>", "</arg_value>")):
        if body.count(begin) > body.count(end):
            return [ToolCall(name="", error=_CUT_OFF)]
    functions = [(m[1].strip(), m[2]) for m in _FUNCTION.finditer(body)]
    read = [(name, *_parameters(_PARAMETER, inner)) for name, inner in functions]
    if any("<function=" in rest for _, _, rest in read):
        return [ToolCall(name="", error=_CUT_OFF)]
    if functions:
        return [_from_texts(name, values) for name, values, _ in read]
    name = body.partition("<arg_key>")[0].strip()
    if name and name[0] not in "{[" and "\n" not in name:
        return [_from_texts(name, _parameters(_ARGUMENT, body)[0])]
    return [_from_value(*_first_value(body))]


def _parameters(pattern: re.Pattern[str], text: str) -> tuple[list[tuple[str, str]], str]:
    """Keys and values in a text, and the rest of it."""
    last = max((match.end() for match in _ENDS[pattern].finditer(text)), default=0)
    return pattern.findall(text, 0, last), pattern.sub("", text[:last]) + text[last:]


def parse_llama(text: str) -> Sequence[ToolCall]:
    """JSON after ``<|python_tag|>``, or a response that is nothing but JSON or Python calls.

    Without the tag the JSON must have a name and parameters (Llama 3; xLAM's is a list of them);
    ``[f(a=1)]`` is Llama 4's, which may have marks around it.
    """
    tagged = "<|python_tag|>" in text
    body = re.sub(r"<\|python_(?:start|end)\|>", "", text.rpartition("<|python_tag|>")[2]).strip()
    if not tagged and re.match(r"\[\s*[\w.]+\(", body):
        return _from_python(body)
    arguments = '"parameters"' in body or '"arguments"' in body
    if not tagged and not (re.match(r"\{|\[\s*\{", body) and '"name"' in body and arguments):
        return []
    return _json_calls(body)


# Readers of the other formats get the groups of a pattern in the table below.


def _mistral(part: str) -> list[ToolCall]:
    """Parse a list of calls, or a name and arguments."""
    named = _MISTRAL_NAMED.match(part)
    return _json_calls(part) if named is None else _call_by_name(named[1], part[named.end() :])


def _deepseek(head: str, body: str) -> list[ToolCall]:
    """``function<sep>NAME`` and fenced JSON (V3, R1), or ``NAME<sep>`` and JSON (V3.1)."""
    head, body = head.strip(), body.strip()
    if head == "function" and not body.startswith("{"):
        head, _, body = body.partition("\n")
    return _call_by_name(head.strip(), body.strip().removeprefix("```json").removesuffix("```"))


def _gemma(name: str, arguments: str) -> list[ToolCall]:
    """``{key:value}`` with ``<|"|>`` or ``<escape>`` around texts."""
    parts = re.split(r'<\|"\|>|<escape>', arguments)  # strings have odd indices
    plain = [re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    plain = [re.sub(r":None\b", ":null", part) for part in plain]
    texts = [json.dumps(part) for part in parts[1::2]]
    return _call_by_name(name, "".join(a + b for a, b in zip(plain, [*texts, ""], strict=False)))


def _invoke(name: str, parameters: str) -> list[ToolCall]:
    values, rest = _parameters(_INVOKED, parameters)
    if "parameter name=" in rest or "invoke name=" in rest:
        return [ToolCall(name="", error=_CUT_OFF)]
    return [_from_texts(name, values)]


def _call_by_name(name: str, arguments: str) -> list[ToolCall]:
    return [_call(name, *_first_value(arguments))]


def _json_calls(text: str) -> list[ToolCall]:
    """Calls in JSON objects one after the other, or in lists of them; other text may follow."""
    calls: list[ToolCall] = []
    text, begin = text.strip(), 0
    while not calls or text.startswith(("{", "["), begin):
        value, error, end = _next_value(text, begin)
        items = value if isinstance(value, list) else [value]
        calls += [_from_value(item, error) for item in items]
        if error or not items:
            break
        begin = _BETWEEN_CALLS.match(text, end).end()  # type: ignore[union-attr]  # matches ""
    return calls


def _first_value(text: str) -> tuple[Any, str]:
    """Parse the JSON value at the start of the text; may return an error."""
    return _next_value(text.strip(), 0)[:2]


def _next_value(text: str, begin: int) -> tuple[Any, str, int]:
    """Parse the JSON value at a position; returns it, an error, and the position of its end."""
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        return None, f"the tool call is not valid JSON: {error}", begin
    return value, "", end


def _from_value(value: Any, error: str) -> ToolCall:
    if error:
        return ToolCall(name="", error=error)
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall(name="", error='a tool call must be an object with "name" and "arguments"')
    return _call(value["name"], value.get("arguments", value.get("parameters", {})), "")


def _call(name: str, arguments: Any, error: str) -> ToolCall:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # clients write both for a function without parameters
    if isinstance(arguments, str):  # JSON text, as in OpenAI's format
        arguments, error = _first_value(arguments)
    if not error and not isinstance(arguments, Mapping):
        error = f"the arguments of {name} must be a JSON object"
    if error:
        return ToolCall(name=name, error=error)
    return ToolCall(name=name, arguments=arguments)


def _from_texts(name: str, values: Sequence[tuple[str, str]]) -> ToolCall:
    """A call in a format without types: values that parse as JSON are JSON, others text."""
    texts = {key.strip(): text for key, text in values}
    arguments = {key: _json_or_text(text) for key, text in texts.items()}
    return ToolCall(name=name, arguments=arguments, texts=texts)


def _json_or_text(text: str) -> Any:
    if text in _PYTHON:  # Python's spelling, as printed by templates
        return _PYTHON[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _from_python(text: str) -> list[ToolCall]:
    """Calls of functions with literal keyword arguments; nothing is evaluated."""
    try:
        tree: Any = ast.parse(text.strip(), mode="eval").body
        calls: list[Any] = tree.elts if isinstance(tree, ast.List) else [tree]
        if any(call.args or None in [k.arg for k in call.keywords] for call in calls):
            raise ValueError("arguments must have names")
        return [
            ToolCall(
                name=ast.unparse(call.func),
                arguments={str(k.arg): ast.literal_eval(k.value) for k in call.keywords},
            )
            for call in calls
        ]
    except Exception as error:  # of the many that text of a policy raises
        problem = re.sub(" at 0x[0-9a-f]+", "", str(error))  # addresses differ between runs
        return [ToolCall(name="", error=f"the tool call is not a list of calls f(a=1): {problem}")]


def _scan(
    pattern: re.Pattern[str], read: Callable[..., Iterable[ToolCall]], text: str
) -> list[ToolCall]:
    return [call for match in pattern.finditer(text) for call in read(*match.groups())]


def _format(pattern: str, read: Callable[..., Iterable[ToolCall]]) -> Parser:
    return partial(_scan, re.compile(pattern, re.DOTALL), read)


_HARMONY = _format(
    r"to=functions\.([\w.-]+)(?![\w.-])(?:(?!to=functions\.)[^{])*?<\|message\|>"
    r"(.*?)(?:<\|call\|>|<\|end\|>|\Z)",
    _call_by_name,
)
# Markers in a chat template; the first match decides.
_BY_MARKER: dict[str, Parser] = {
    "<｜tool▁call▁begin｜>": _format(
        r"<｜tool▁call▁begin｜>((?:(?!<｜tool▁call▁begin｜>).)*?)<｜tool▁sep｜>(.*?)"
        r"(?:<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|\Z)",
        _deepseek,
    ),
    "to=functions.": _HARMONY,  # gpt-oss
    "'functions.'": _HARMONY,
    "<|tool_call_start|>": _format(  # LFM2
        r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)", _from_python
    ),
    "<|tool_call|>": _format(  # Phi-4-mini
        r"<\|tool_call\|>(.*?)(?:<\|/tool_call\|>|\Z)", _json_calls
    ),
    "<|tool_call>": _format(  # Gemma 4
        r"<\|tool_call>call:([\w.-]+)(\{.*?)(?:<tool_call\|>|(?=<\|tool_call>)|\Z)", _gemma
    ),
    "<start_function_call>": _format(  # FunctionGemma
        r"<start_function_call>call:([\w.-]+)(\{.*?)"
        r"(?:<end_function_call>|(?=<start_function_call>)|\Z)",
        _gemma,
    ),
    "invoke name=": _format(  # MiniMax-M2, DeepSeek V3.2; tags may have a prefix
        r'<(?:[^\s<>]*[:｜])?invoke name="([^"]+)">(.*?)(?:</(?:[^\s<>]*[:｜])?invoke>|\Z)', _invoke
    ),
    "<tool_calls>": _format(r"<tool_calls>(.*?)(?:</tool_calls>|\Z)", _json_calls),  # Hunyuan
    "<TOOLCALL>": _format(r"<TOOLCALL>(.*?)(?:</TOOLCALL>|\Z)", _json_calls),  # Nemotron Nano v2
    "<tool_call>": parse_tagged,
    "<function=": parse_tagged,
    "[TOOL_CALLS]": _format(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)", _mistral),
    "<|python_tag|>": parse_llama,
    '"parameters":': parse_llama,
}
