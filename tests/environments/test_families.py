"""Tool calls of model families, on their original chat templates (those that TRL ships)."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from kedge.environments.tool_calls import (
    parse_any,
    reasoning_blocks,
    split_reasoning,
    tool_parser,
)
from kedge.environments.tools import ToolEnvironment
from kedge.environments.turn_tokens import TurnTokens
from kedge.types import Response, Sampling

SPEC = find_spec("trl")
FOLDER = Path(SPEC.origin).parent / "chat_templates" if SPEC and SPEC.origin else Path()
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the templates of trl")
FAMILIES = [
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink"),
    *("qwen3_6", "qwen3_8", "llama3_1", "llama3_2", "deepseekv3", "glm4moe", "gptoss"),
    *("gemma4", "gemma4_v2", "gemma4_v5", "lfm2_2_5", "lfm2_2_5_v2", "muse_glimmer"),
    *("nemotron_3_nano", "nemotron_3_super", "nemotron_3_5_lightning"),
]
ARGUMENTS = {"number": 12, "text": "3", "words": "a b"}


def find(number: int, text: str, words: str) -> str:
    """Find it.

    Args:
        number: A number.
        text: A text.
        words: Words.
    """
    return f"{number!r} {text!r} {words!r}"


def template(family: str) -> str:
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")


def rendered_call(family: str) -> str:
    """What the template makes of an assistant message with a call."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):  # DeepSeek wants a text
        function = {"name": "find", "arguments": arguments}
        calls = [{"type": "function", "id": "abcdefghi", "function": function}]
        messages = [{"role": "user", "content": "QUESTION"}]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
        how = {"tools": ToolEnvironment([find]).tools, "chat_template": template(family)}
        try:
            texts, _ = render_jinja_template([messages], **how)
        except Exception:
            continue
        (start,), _ = render_jinja_template([messages[:1]], add_generation_prompt=True, **how)
        rest = texts[0].rpartition("QUESTION")[2]
        text = texts[0].removeprefix(start) if texts[0].startswith(start) else rest
        return text.removesuffix("<|eot_id|>")  # Llama's stop token
    raise AssertionError(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_comes_back_and_is_made(family: str) -> None:
    text = rendered_call(family)
    assert "find" in text
    parse = tool_parser(template(family))
    _, answer = split_reasoning(text.partition("<think>")[1] + text.partition("<think>")[2] or text)
    (call,) = parse(answer)
    assert (call.name, call.error) == ("find", "")
    assert [call.name for call in parse_any(answer)] == ["find"]
    environment = ToolEnvironment([find])
    environment.reset(seed=0, options={})
    messages, *_ = environment.step(Response(answer, raw=answer, parse=parse))
    assert messages[0]["content"] == "12 '3' 'a b'"  # types of the schema, whatever the format


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token per character, and the template of a family."""
    vocabulary = {chr(i): i for i in range(1, 256)} | {"<stop>": 0, "｜": 256, "▁": 257}  # noqa: RUF001
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<stop>", chat_template=template(family)
    )


@pytest.mark.parametrize(
    ("family", "behind"),
    [("gptoss", "to=assistant"), ("gemma4", "response:find"), ("qwen3_5_think", "tool_response")],
)
def test_results_are_rendered_as_the_template_does(family: str, behind: str) -> None:
    """gpt-oss and Gemma 4 render results only behind a call; they are not user messages."""
    tokens = TurnTokens(tokenizer(family))
    result = [{"role": "tool", "name": "find", "content": "RESULT", "tool_call_id": "000000000"}]
    prompt = [{"role": "user", "content": "Q"}]
    ids = tokens.between(prompt, result, last=0, stopped=True)
    text = tokenizer(family).decode(ids)
    assert behind in text
    cut_off = tokens.between(prompt, result, last=ord("o"), stopped=False)
    assert "RESULT" in tokenizer(family).decode(cut_off)
    assert cut_off[-len(ids) // 2 :] == ids[-len(ids) // 2 :]  # whatever its last token was
    assert "RESULT" in text
    assert "find: RESULT" not in text  # how a user message would say it


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>a <tool_call></think>b", False, "a <tool_call>", "b"),
        ("a</think>\n\nb", True, "a", "\n\nb"),
        ("still thinking", True, "still thinking", ""),
        ("no <think> here", False, "", "no <think> here"),
        ("[THINK]a[/THINK]b", False, "a", "b"),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, answer: str) -> None:
    assert split_reasoning(text, opened=opened) == (reasoning, answer)


def test_all_reasoning_of_a_conversation() -> None:
    """An end without a beginning counts, since templates cut there; blanks do not."""
    text = "a</think>b<think>\n c d</think>e[THINK][/THINK]f<|end|><think>g"
    assert reasoning_blocks(text) == ["", "cd", "", "g"]


def test_a_call_within_the_reasoning_is_not_made() -> None:
    inner = tokenizer("qwen3")
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    ids = inner(f"<think>I could write {call} but must not</think>no", add_special_tokens=False)
    tokens, sampling = TurnTokens(inner), Sampling(max_new_tokens=9)
    response = tokens.response(ids["input_ids"], True, sampling)
    assert (list(response.tool_calls), response.text) == ([], "no")
    assert response.reasoning == f"I could write {call} but must not"
    answer = inner("a</think>b", add_special_tokens=False)["input_ids"]
    for before, text in (("assistant\n<think>\n", "b"), ("assistant\n", "a</think>b")):
        read = tokens.response(answer, True, sampling, inner(before)["input_ids"])
        assert read.text == text  # only what the prompt has opened is reasoning


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("<tool_call><function=find><parameter=words>cut o", "cut off within an argument"),
        ("<tool_call>find<arg_key>words</arg_key><arg_value>cut o", "cut off within an argument"),
        ("[find(3)]", "arguments must have names"),
    ],
)
def test_half_a_call_is_not_made(call: str, error: str) -> None:
    (read,) = parse_any(call)
    assert error in read.error


def test_python_words_of_a_template() -> None:
    body = "<parameter=flag>\nTrue\n</parameter><parameter=x>\nNone\n</parameter>"
    (call,) = parse_any(f"<tool_call><function=f>{body}</function></tool_call>")
    assert call.arguments == {"flag": True, "x": None}


@pytest.mark.parametrize(
    "text",
    [  # as their documentation shows them; no template is at hand
        "<function=find>\n<parameter=number>\n12\n</parameter>\n</function>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
        '{"number": 12}<|tool_call_end|><|tool_calls_section_end|>',
        '<minimax:tool_call>\n<invoke name="find">\n<parameter name="number">12</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        '<|tool_call|>[{"name": "find", "arguments": {"number": 12}}]<|/tool_call|>',
        "[find(number=12)]",
        '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"number": 12}',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"number": 12}',  # noqa: RUF001
    ],
)
def test_other_families(text: str) -> None:
    (call,) = parse_any(text)
    assert (call.name, call.arguments, call.error) == ("find", {"number": 12}, "")
