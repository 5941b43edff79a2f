"""The tokens between the turns of a conversation, from the chat template.

What the policy sampled is never tokenized again: a conversation is the tokens of the prompt, the
tokens of the first response as sampled, the tokens that the template puts between it and the next
response, and so on.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

import numpy as np
from torch import Tensor

from kedge.chat_template import generation_options, render_chat
from kedge.data.decode import Decoder
from kedge.environments.episode import describe, read_token_ids
from kedge.environments.tool_calls import (
    REASONING,
    REASONING_FIELDS,
    read_by_template,
    reasoning_blocks,
    split_reasoning,
    tool_parser,
)
from kedge.records.errors import ConfigError, DataError, RolloutError
from kedge.records.protocols import NewContext, Observation
from kedge.records.types import Response, Sampling, ToolCall

logger = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]

_ANSWER = "KEDGE0ANSWER"  # placeholder for the response in a rendered conversation
_RESULT = "KEDGE0RESULT"
_FINAL = "<|channel|>final<|message|>"
_CHARACTERS = 16  # per token, more than in any text that is worth reading
_TAIL = 32  # prompt tokens that are compared
_CUT = "...(truncated)..."  # replaces the middle of an observation that is too long
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "."}
_TOOL_RESULT = {"role": "tool", "name": "f", "content": _RESULT, "tool_call_id": "000000000"}
_CALL = re.compile(r"<\|tool_call>|\[TOOL_CALLS\]")  # begins a call


class TurnTokens:
    """Renders observations for the policy's tokenizer; without one they must be token ids."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        size = getattr(tokenizer, "__len__", lambda: None)()
        self._vocabulary = size if vocabulary is None else vocabulary
        self._options = dict(chat_template_kwargs or {})
        self._decode = Decoder(tokenizer)
        template = getattr(tokenizer, "chat_template", None)
        self._parse = tool_parser(template)
        self._has_channels = "<|channel|>analysis" in str(template)  # gpt-oss
        self._by_template = False  # transformers' parser reads the calls
        self._tools: list[Any] | None = None  # if the template needs them to render results
        self._checked_tools = False
        self._variants: dict[str, TurnTokens] = {}  # by chat_template_kwargs of rows

    def variant(self, options: Mapping[str, Any]) -> TurnTokens:
        """The same with a row's own ``chat_template_kwargs``."""
        if not options:
            return self
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._variants:
            template = {**self._options, **options}
            self._variants[key] = TurnTokens(
                self._tokenizer, chat_template_kwargs=template, vocabulary=self._vocabulary
            )
        return self._variants[key]

    def read(self, observation: Any, most: int | None) -> Observation:
        """Check an observation; one of more than ``most`` tokens is cut before it is tokenized.

        Raises:
            RolloutError: it is neither text, messages, nor token ids of the vocabulary.
        """
        if isinstance(observation, NewContext):
            return replace(observation, messages=self.read(observation.messages, most))
        if isinstance(observation, Tensor | np.ndarray) or _token_ids(observation) is not None:
            observation = read_token_ids(observation, self._vocabulary, "an observation")
        if most is None or not observation or _length(observation) <= _CHARACTERS * most:
            return observation
        return self._cut(observation, _CHARACTERS * max(most, 1))

    def response(
        self, ids: list[int], terminated: bool, sampling: Sampling, before: Sequence[int] = ()
    ) -> Response:
        """Build the ``Response`` for an environment; ``before`` are the preceding tokens."""
        if self._tokenizer is None:
            return Response("", ids=tuple(ids), terminated=terminated)
        body = ids[:-1] if ids and ids[-1] in sampling.stop_ids else ids
        decode = self._tokenizer.decode
        whole = decode(body)
        prompt = decode(list(before[-_TAIL:]))
        opened = any(prompt.rstrip().endswith(mark) for mark, _ in REASONING)
        reasoning, answer = split_reasoning(whole, opened=opened)
        begin = 0
        if len(answer) < len(whole):  # find where the answer starts
            skipped = len(whole) - len(answer)
            begin = bisect_left(range(len(body)), skipped, key=lambda i: len(decode(body[:i])))
        text = self._decode([body[begin:]])[0]
        if _FINAL in answer:  # gpt-oss names the channel in plain text
            text = answer.rpartition(_FINAL)[2]
        response = Response(
            text,
            ids=tuple(ids),
            terminated=terminated,
            raw=answer,
            parse=self._parse,
            reasoning=reasoning,
        )
        if self._by_template and answer:
            reasoning, text, calls = read_by_template(self._tokenizer, prompt, decode(ids))
            response = replace(response, text=text, reasoning=reasoning, parse=lambda _: calls)
        return response

    def prompt(
        self,
        prompt: object,
        ids: Sequence[int],
        observation: Observation,
        *,
        tools: Sequence[Any] | None = None,
        separator: str = "\n\n",
        reads_calls: bool = False,
    ) -> list[int]:
        """Token ids of the prompt with the first observation.

        A text observation is appended to the last user message or the text of the prompt, after
        ``separator``; messages come after the prompt, or replace it if it is empty.  The template
        shows ``tools`` (JSON schemas); if the environment ``reads_calls``, it must render them
        readably.
        """
        if not _is_chat(prompt):
            if tools:
                raise DataError(
                    "tools need prompts of chat messages, since the chat template shows them to"
                    f" the policy; got the text {str(prompt)[:80]!r}"
                )
            text = separator + observation if isinstance(observation, str) else observation
            return [*ids, *self._plain(text if observation else None)]
        token_ids = _token_ids(observation)
        if token_ids is not None:
            return [*ids, *token_ids]
        if not observation and not tools:
            return list(ids)
        messages = _with_first(_messages(prompt), observation, separator)
        text = self._render(messages, tools=list(tools) if tools else None)
        if tools and not self._checked_tools:
            self._check_tools(tools, text, reads_calls)
            self._checked_tools = True
        return self._encode(text)

    def between(
        self, prompt: object, observation: Observation, *, last: int, stopped: bool
    ) -> list[int]:
        """Token ids between a response and the next one; ``prompt`` decides if this is a chat.

        If ``last``, the last token of the response, ``stopped`` it, the template's copy of the stop
        token is left out.
        """
        if _token_ids(observation) is not None or not _is_chat(prompt):
            return self._plain(observation)
        messages = _messages(observation)
        if _has_results(messages) and self._tool_role == "call":
            stop = self._tokenizer.decode([last]) if stopped else ""
            return self._encode(self._after_call(messages, stop))
        ids = self._encode(self._after_answer(self._with_known_roles(messages)))
        return ids[1:] if stopped and ids[:1] == [last] else ids

    def context(self, prompt: object, new: NewContext, *, tools: Sequence[Any] | None) -> list[int]:
        """Token ids of a new context; ``prompt`` decides whether this is a chat."""
        if _token_ids(new.messages) is not None or not _is_chat(prompt):
            return self._plain(new.messages)
        messages = self._with_known_roles(_messages(new.messages))
        return self._encode(self._render(messages, tools=list(tools) if tools else None))

    def check_drops_reasoning(self) -> None:
        """Raise ConfigError if the template renders the reasoning of earlier turns."""
        answer = {"role": "assistant", "content": ".", **dict.fromkeys(REASONING_FIELDS, _ANSWER)}
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "drop_reasoning needs a tokenizer with a chat template, which renders earlier turns"
                " without their reasoning"
            )
        if _ANSWER in self._render([_QUESTION, answer, _QUESTION]):
            raise ConfigError(
                "drop_reasoning has no effect, since the chat template renders the reasoning of"
                " earlier turns; leave it out, or set the template's option in"
                " chat_template_kwargs, for example {'preserve_thinking': False}"
            )

    def conversation(
        self,
        prompt: object,
        ids: Sequence[int],
        observation: Observation = None,
        *,
        tools: Sequence[Any] | None = None,
        separator: str = "",
    ) -> list[dict[str, Any]]:
        """The messages of a prompt with the first observation, rendered as ``ids``.

        Raises:
            ConfigError: the template renders something else.
        """
        if _is_chat(prompt) and _token_ids(observation) is None:
            messages = _with_first(_messages(prompt), observation, separator)
            answered = messages[-1]["role"] == "assistant"
            if not answered and self.context(prompt, NewContext(messages), tools=tools) == ids:
                return [dict(message) for message in messages]
        raise ConfigError(
            "drop_reasoning renders the conversation again, but the chat template does not give the"
            f" tokens of the prompt {str(prompt)[:80]!r}: it needs chat messages, neither cut by"
            " max_prompt_length nor ending in a message of the assistant; or leave it out"
        )

    def answer(self, response: Response, after: Messages) -> dict[str, Any]:
        """The message of a response, given those ``after`` it, for ``drops_reasoning``.

        Its content is what the policy wrote after the reasoning.  Calls are a part of it, unless
        the template renders results only after calls that it has rendered.
        """
        text = response.text if response.raw is None else response.raw
        reasoning = response.reasoning
        if self._has_channels:  # the template refuses their mark, and text next to a call
            text, reasoning = (x.replace("<|channel|>", "") for x in (response.text, reasoning))
        message: dict[str, Any] = {"role": "assistant", "content": text.lstrip("\n")}
        if reasoning:
            message |= dict.fromkeys(REASONING_FIELDS, reasoning)
        results = [m for m in after if m["role"] == "tool"]
        if results and not self._calls_are_text:
            message["content"] = "" if self._has_channels else _CALL.split(text)[0].strip()
            calls = [
                {"name": call.name or "unknown", "arguments": {**call.arguments}}
                for call in response.tool_calls
            ] or [{"name": results[0].get("name", "unknown"), "arguments": {}}]
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": result.get("tool_call_id", "000000000"),
                    "function": call,
                }
                for call, result in zip(calls, results, strict=False)
            ]
        return message

    def drops_reasoning(
        self, before: Sequence[int], messages: Messages, *, tools: Sequence[Any] | None
    ) -> bool:
        """Whether the template renders a conversation without reasoning that its tokens have."""
        rendered = self.context([], NewContext(messages), tools=tools)
        texts = [self._tokenizer.decode(list(ids)) for ids in (before, rendered)]
        return reasoning_blocks(texts[0]) != reasoning_blocks(texts[1])

    def shorten(
        self, observation: Observation, render: Callable[[Observation], list[int]], most: int
    ) -> tuple[list[int], Observation] | None:
        """Cut the middle of an observation so that ``render`` gives at most ``most`` tokens.

        Returns these tokens and the shortened observation; None if nothing fits.
        """
        best, low, high = None, 1, _length(observation) if most > 0 else 0
        length = min(4 * most, high)
        while low <= high:
            cut = self._cut(observation, length)
            ids = render(cut)
            if len(ids) <= most:
                best, low = (ids, cut), length + 1
            else:
                high = length - 1
            length = min((low + high) // 2, 2 * length)
        return best

    def _cut(self, observation: Observation, length: int) -> Observation:
        """Keep at most ``length`` characters of each message, or token ids."""
        if isinstance(observation, NewContext):
            return replace(observation, messages=self._cut(observation.messages, length))
        token_ids = _token_ids(observation)
        if token_ids is not None:
            return _without_middle(token_ids, self._encode(_CUT) if self._tokenizer else [], length)
        if isinstance(observation, str):
            return _without_middle(observation, _CUT, length)
        return [
            {**message, "content": _without_middle(message.get("content") or "", _CUT, length)}
            for message in _messages(observation)
        ]

    def _plain(self, observation: Observation) -> list[int]:
        token_ids = _token_ids(observation)
        if token_ids is not None:
            return token_ids
        if observation is None:
            return []
        if not isinstance(observation, str):
            raise RolloutError(
                "an environment may return chat messages only if the prompts of the dataset are"
                " chat messages; got a text prompt"
            )
        return self._encode(observation)

    def _check_tools(self, tools: Sequence[Any], text: str, reads_calls: bool) -> None:
        """Warn of tools that the prompt does not show; refuse a template whose calls are lost.

        Without tools in the prompt the policy may still know them, from supervised training.
        """
        hidden = [name for name in map(_tool_name, tools) if name not in text]
        if hidden:
            logger.warning(
                "the chat template does not show the tools %s to the policy: describe them and the"
                " format of a call in a system message, or use a chat template that renders tools;"
                " no change is needed if the policy was trained to call them without",
                ", ".join(hidden),
            )
        if not reads_calls:
            return
        without = self._result_texts()
        self._tools = list(tools)
        if self._result_texts() == without:
            self._tools = None
        question: Messages = [{"role": "user", "content": _ANSWER}]
        name, arguments = _tool_name(tools[0]), {"x": 12, "text": "a b"}
        call: dict[str, Any] = {"type": "function", "id": "000000000"}
        start, rendered, end = "", "", ""
        answer = {"role": "assistant", "content": _ANSWER}
        for written in (arguments, json.dumps(arguments)):  # DeepSeek's template needs a string
            calls = [call | {"function": {"name": name, "arguments": written}}]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
            with suppress(DataError):  # templates without tool calls raise it
                start = self._render(question, tools=list(tools))
                text, whole = (
                    self._render([*question, last], tools=list(tools), add_generation_prompt=False)
                    for last in (turn, answer)
                )
                end = whole.rpartition(_ANSWER)[2]
                after = text.rpartition(_ANSWER)[2]
                rendered = text.removeprefix(start) if text.startswith(start) else after
                break

        def reads(calls: Sequence[ToolCall]) -> bool:  # types are a matter of the tool's schema
            strings = [(c.name, {k: str(v) for k, v in c.arguments.items()}) for c in calls]
            return (name, {k: str(v) for k, v in arguments.items()}) in strings

        if not name or name not in rendered or reads(self._parse(rendered.removesuffix(end))):
            return
        if getattr(self._tokenizer, "response_template", None) is not None:
            self._by_template = reads(read_by_template(self._tokenizer, start, rendered)[2])
        if not self._by_template:
            raise ConfigError(
                "the chat template renders a tool call in a format that is not read back:"
                f" {rendered[:200]!r}; use the template of a family in"
                " docs/reference/tool-calls.md, one without tools (and describe them and"
                " <tool_call> in a system message), or a tokenizer"
                " with a response_template for transformers' parse_response"
            )

    def _with_known_roles(self, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages, those of tools as the user's if the template has no role for them."""
        if not _has_results(messages) or self._tool_role != "user":
            return messages
        return [
            {"role": "user", "content": f"{m.get('name', 'tool')}: {m['content']}"}
            if m["role"] == "tool"
            else m
            for m in messages
        ]

    @cached_property
    def _calls_are_text(self) -> bool:
        """Whether the template renders results after calls in the content of an answer."""
        answer = {"role": "assistant", "content": "."}
        messages = self._with_known_roles([_QUESTION, answer, _TOOL_RESULT, answer, _QUESTION])
        with suppress(DataError):
            return _RESULT in self._render(messages)
        return False

    @cached_property
    def _tool_role(self) -> str:
        """How the template renders tool messages: "plain", after a "call" only, or as "user"."""
        texts = self._result_texts()
        if _RESULT in texts["plain"] and texts["plain"].endswith(texts["call"]):
            return "plain"
        return next((role for role in ("call", "plain") if _RESULT in texts[role]), "user")

    def _result_texts(self) -> dict[str, str]:
        texts = {"plain": "", "call": ""}
        for role, render in (("plain", self._after_answer), ("call", self._after_call)):
            with suppress(Exception):  # templates may raise anything
                texts[role] = render([_TOOL_RESULT])
        return texts

    def _after_call(self, messages: Messages, stop: str = "") -> str:
        """Text that the template renders after a call, without its stop token."""
        calls = [
            {
                "type": "function",
                "id": message.get("tool_call_id") or "000000000",
                "function": {"name": message.get("name") or "f", "arguments": {"x": _ANSWER}},
            }
            for message in messages
            if message["role"] == "tool"
        ]
        head = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        _, rendered, call_end = self._render(head, add_generation_prompt=False).rpartition(_ANSWER)
        if not rendered:
            raise DataError("the chat template does not render tool calls")
        rest = self._render([*head, *messages]).rpartition(_ANSWER)[2]
        if stop and stop in call_end:
            return rest.partition(stop)[2]
        return rest[len(commonprefix([call_end, rest])) :]  # noqa: RUF071  (not paths)

    def _after_answer(self, messages: Messages) -> str:
        """Text that the template renders after the content of an assistant message."""
        head = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
        text = self._render([*head, *messages])
        if text.count(_ANSWER) != 1:
            raise DataError(
                "the chat template must render the content of an assistant message once, but"
                f" renders it {text.count(_ANSWER)} times"
            )
        return text.partition(_ANSWER)[2]

    def _render(self, messages: Messages, **options: Any) -> str:
        if "add_generation_prompt" not in options:
            options |= generation_options(messages)
        options = {"tools": self._tools} | options | self._options
        return render_chat(self._tokenizer, messages, where="an episode", **options)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RolloutError(
                "an environment returned text, which needs a tokenizer; pass tokenizer= to"
                " EnvironmentRollouts, or return token ids"
            )
        return list(self._tokenizer(valid_text(text), add_special_tokens=False)["input_ids"])


def as_messages(observation: Observation) -> list[dict[str, Any]]:
    """Convert an observation to chat messages; empty for token ids."""
    if isinstance(observation, NewContext):
        observation = observation.messages
    if _token_ids(observation) is not None:
        return []
    return [dict(message) for message in _messages(observation)]


def _has_results(messages: Messages) -> bool:
    return any(message["role"] == "tool" for message in messages)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str)


def _token_ids(observation: Observation) -> list[int] | None:
    """The observation if it consists of token ids, else None."""
    if isinstance(observation, bytes | bytearray):
        raise RolloutError(
            f"an observation must be text, messages or token ids, got {observation[:40]!r}; decode"
            " the bytes"
        )
    if isinstance(observation, Tensor):
        return [int(i) for i in observation.tolist()]
    if isinstance(observation, Sequence) and not isinstance(observation, str) and observation:
        ids = [
            int(i)
            for i in observation
            if isinstance(i, int | np.integer) and not isinstance(i, bool)
        ]
        return ids if len(ids) == len(observation) else None
    return None


def _length(observation: Observation) -> int:
    """Characters of the longest message, or token ids."""
    if isinstance(observation, NewContext):
        observation = observation.messages
    token_ids = _token_ids(observation)
    if token_ids is not None:
        return len(token_ids)
    return max(len(message.get("content") or "") for message in _messages(observation))


def _without_middle(whole: Any, mark: Any, length: int) -> Any:
    """Replace the middle of text or token ids by a mark; keeps ``length`` items."""
    if len(whole) <= length:
        return whole
    return whole[: (length + 1) // 2] + mark + whole[len(whole) - length // 2 :]


def valid_text(text: str) -> str:
    """The text with "?" for lone surrogates, which a call's JSON may have and nothing encodes."""
    return text.encode("utf-8", "replace").decode()


def _messages(observation: object) -> list[Mapping[str, Any]]:
    if observation is None or isinstance(observation, str):
        return [{"role": "user", "content": valid_text(observation or "")}]
    messages: list[Any] = list(observation) if isinstance(observation, Sequence) else [observation]
    if not messages:
        return _messages(None)
    for message in messages:
        if not (
            isinstance(message, Mapping)
            and "role" in message
            and ("content" in message or message.get("tool_calls"))
        ):
            raise RolloutError(
                "a message must be a mapping with role and content (or tool_calls), got"
                f" {describe(message)}"
            )
    return [
        {**message, "content": plain_text(message["content"])} if "content" in message else message
        for message in messages
    ]


def plain_text(content: Any) -> Any:
    """The text of a message; joins its parts, and refuses others, such as images."""
    if content is None or isinstance(content, str):
        return content and valid_text(content)
    parts = content if isinstance(content, Sequence) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RolloutError(
                f"the content of a message must be text, got a part of type {kind!r}; images are"
                " not supported"
            )
    return "\n".join(part["text"] for part in parts)


def _with_first(
    prompt: list[Mapping[str, Any]], observation: Observation, separator: str
) -> list[Mapping[str, Any]]:
    if not observation:
        return prompt
    if not isinstance(observation, str):
        kept = [] if len(prompt) == 1 and not prompt[0].get("content") else prompt
        return [*kept, *_messages(observation)]
    if not prompt or prompt[-1]["role"] != "user":
        return [*prompt, {"role": "user", "content": observation}]
    content = prompt[-1].get("content")
    joined = f"{content}{separator}{observation}" if content else observation
    return [*prompt[:-1], {**prompt[-1], "content": joined}]


def _tool_name(tool: Any) -> str:
    """The name of a tool: a function, or a JSON schema with or without the key "function"."""
    if not isinstance(tool, Mapping):
        return str(getattr(tool, "__name__", ""))
    inner = tool.get("function")
    return str((inner if isinstance(inner, Mapping) else tool).get("name", ""))
