"""Tool calls of model families, on their original chat templates.

Those that TRL ships, and those in the folder KEDGE_TEMPLATES, or ``templates`` of KEDGE_SHARED.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from kedge.environments import EnvironmentRollouts
from kedge.environments.tool_calls import (
    parse_any,
    read_by_template,
    reasoning_blocks,
    split_reasoning,
    tool_parser,
)
from kedge.environments.tools import ToolEnvironment
from kedge.environments.turn_tokens import TurnTokens
from kedge.records.errors import ConfigError, DataError
from kedge.records.types import PromptBatch, Response, Sampling
from kedge.testing import ScriptedRollouts

SPEC = find_spec("trl")
FOLDER = Path(SPEC.origin).parent / "chat_templates" if SPEC and SPEC.origin else Path()
SHARED = Path(os.environ.get("KEDGE_SHARED", Path(__file__).parents[3] / "shared"))
MORE = Path(os.environ.get("KEDGE_TEMPLATES", SHARED / "templates"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the templates of trl")
# Transformers' parser reads them by a response template of TRL.
PARSED = [
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink"),
    *("qwen3_6", "qwen3_8", "llama3_1", "llama3_2", "glm4moe", "gptoss"),
    *("gemma4", "gemma4_v2", "gemma4_v5", "lfm2_2_5", "lfm2_2_5_v2"),
    *("nemotron_3_nano", "nemotron_3_super", "nemotron_3_5_lightning"),
]
FAMILIES = [*PARSED, "deepseekv3", "muse_glimmer"]
ARGUMENTS = {"number": 12, "text": "3", "words": "a b"}
QUESTION = [{"role": "user", "content": "QUESTION"}]


def find(number: int, text: str, words: str) -> str:
    """Find it.

    Args:
        number: A number.
        text: A text.
        words: Words.
    """
    return f"{number!r} {text!r} {words!r}"


TOOLS = ToolEnvironment([find]).tools
RIGHT = "12 '3' 'a b'"


def template(family: str) -> str:
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")


def tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """One token per character; those of Latin-1 are their code points."""
    characters = {chr(i) for i in range(1, 256)} | set(chat_template)
    vocabulary = {"<stop>": 0} | {c: i for i, c in enumerate(sorted(characters), 1)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<stop>", chat_template=chat_template
    )


def rendered(chat_template: str, calls: int = 1) -> tuple[str, str, str] | None:
    """A prompt, what the template adds for calls, and for their results; None if it refuses."""
    ids = [f"00010000{i}" for i in range(calls)]
    how: dict[str, Any] = {"tools": TOOLS, "chat_template": chat_template, "bos_token": "<s>"}
    how["eos_token"] = "<stop>"
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):  # DeepSeek wants a text
        function = {"name": "find", "arguments": arguments}
        turn = [{"type": "function", "id": i, "function": function} for i in ids]
        messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": turn}]
        whole = [*messages, *(results(ids))]
        try:
            (start, end), _ = render_jinja_template(
                [QUESTION, whole], add_generation_prompt=True, **how
            )
            (text,), _ = render_jinja_template([messages], **how)
        except Exception:
            continue
        after = text.rpartition("QUESTION")[2]
        return start, text.removeprefix(start) if text.startswith(start) else after, end
    return None


def results(ids: list[str]) -> list[dict[str, Any]]:
    return [{"role": "tool", "name": "find", "content": "OUTPUT", "tool_call_id": i} for i in ids]


def answers(answer: str, parse: Any) -> list[str]:
    """What the tool answers to the calls in a response."""
    environment = ToolEnvironment([find])
    environment.reset(seed=0, options={})
    messages, *_ = environment.step(Response(answer, raw=answer, parse=parse))
    return [message["content"] for message in messages or ()]


def without_end(text: str) -> str:
    """Without the stop tokens of Llama, which end a turn of nothing but a call."""
    return text.removesuffix("<|eot_id|>").removesuffix("<|eot|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_comes_back_and_is_made(family: str) -> None:
    parts = rendered(template(family))
    assert parts is not None
    text = without_end(parts[1])
    _, answer = split_reasoning(text.partition("<think>")[1] + text.partition("<think>")[2] or text)
    parse = tool_parser(template(family))
    assert answers(answer, parse) == [RIGHT]  # types of the schema, whatever the format
    assert [(c.name, c.error) for c in parse_any(answer)] == [("find", "")]
    cut_off = answer[: answer.index("a b") + 2]
    for read in (parse, parse_any):
        (call,) = read(cut_off)
        assert call.error  # half a call is neither made nor taken for an answer


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_rendered_as_the_template_does(family: str) -> None:
    """gpt-oss and Gemma 4 render results only behind a call; they are not user messages."""
    assert results_are_exact(template(family)) >= 1


def results_are_exact(chat_template: str) -> int:
    """Compare the tokens behind one and two calls with the template; how many it renders."""
    tokens = TurnTokens(tokenizer(chat_template))
    tokens.prompt(QUESTION, [], None, tools=TOOLS, reads_calls=True)
    compared = 0
    for calls in (1, 2):
        parts = rendered(chat_template, calls)
        if parts is not None:
            ids = [f"00010000{i}" for i in range(calls)]
            between = tokens.between(QUESTION, results(ids), last=-1, stopped=False)
            text = tokenizer(chat_template).decode(between)
            assert text.count("OUTPUT") == calls
            assert parts[2].endswith(text)
            compared += 1
    return compared


# Parts of the names of templates whose calls must be read.
NAMES = (
    *("MiniMax-M1", "MiniMax-M2", "Llama-4", "Phi-4-mini", "Qwen3-Coder", "Qwen2.5"),
    *("Mistral", "DeepSeek-V3", "DeepSeek-V4", "Seed-OSS", "GLM-4", "Nemotron", "granite-4"),
    *("gpt-oss", "gemma-4", "Hermes", "Apriel", "xlam", "hunyuan", "SmolLM3"),
)


@pytest.mark.parametrize(
    "path",
    sorted(MORE.glob("*.jinja"))
    or [pytest.param(None, marks=pytest.mark.skip(reason=f"no chat templates at {MORE}"))],
    ids=lambda path: path.stem if path else "none",
)
def test_further_templates_are_read_or_refused(path: Path) -> None:
    chat_template = path.read_text(encoding="utf-8")
    tokens = TurnTokens(tokenizer(chat_template))
    try:
        tokens.prompt(QUESTION, [], None, tools=TOOLS, reads_calls=True)
    except ConfigError:
        assert not any(name in path.stem for name in NAMES)
        return
    except DataError as error:
        pytest.skip(f"cannot be rendered: {str(error)[-200:]}")
    read = 0
    for calls in (1, 2):
        parts = rendered(chat_template, calls)
        if parts is not None and "find" in parts[1]:
            _, answer = split_reasoning(without_end(parts[1]))
            found = [c for c in tool_parser(chat_template)(answer) if c.name == "find"]
            texts = [{k: str(v) for k, v in call.arguments.items()} for call in found]
            assert texts == [{k: str(v) for k, v in ARGUMENTS.items()}] * len(found)
            assert len(found) == parts[1].count("a b")
            read += 1
    assert not read or results_are_exact(chat_template) >= 1


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
    inner = tokenizer(template("qwen3"))
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
    ("text", "calls"),
    [
        ("to=functions." + 20_000 * "a", 0),
        ("<tool_call>f" + 600 * "</arg_value>" + 600 * "<arg_key></arg_key><arg_value>", 1),
        ("[TOOL_CALLS]a" + 20_000 * " ", 1),
    ],
    ids=["gpt-oss", "GLM", "Mistral"],
)
def test_long_degenerate_text_is_read_in_linear_time(text: str, calls: int) -> None:
    """Else the search takes seconds to hours, in which no other thread runs."""
    assert len(parse_any(text)) == calls


ENDS = {
    "DeepSeek V3.1": "<｜tool▁call▁end｜>",  # noqa: RUF001
    "MiniMax-M2": "</invoke>", "DeepSeek V3.2": "</｜DSML｜invoke>",  # noqa: RUF001
    "FunctionGemma": "<end_function_call>", "Qwen3-Coder without tags": "</function>",
}  # fmt: skip


@pytest.mark.parametrize("family", ENDS)
def test_a_call_without_its_end_does_not_take_arguments_of_the_next(family: str) -> None:
    text = OTHERS[family].replace(ENDS[family], "", 1)
    if ENDS[family].startswith("</"):  # a value may have the words of these marks
        (call,) = parse_any(text)
        assert "has no end" in call.error
    else:
        assert answers(text, parse_any) == [RIGHT, RIGHT]


def test_a_value_may_have_the_words_of_a_mark() -> None:
    body = '<parameter name="text">write parameter name="x" here</parameter>'
    (call,) = parse_any(f'<invoke name="f">{body}</invoke>')
    assert (call.error, call.arguments) == ("", {"text": 'write parameter name="x" here'})


def test_python_words_of_a_template() -> None:
    body = "<parameter=flag>\nTrue\n</parameter><parameter=x>\nNone\n</parameter>"
    (call,) = parse_any(f"<tool_call><function=f>{body}</function></tool_call>")
    assert call.arguments == {"flag": True, "x": None}


JSON = json.dumps(ARGUMENTS)
OBJECT = json.dumps({"name": "find", "arguments": ARGUMENTS})
XML = "".join(f"<parameter={key}>{value}</parameter>" for key, value in ARGUMENTS.items())
NAMED = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in ARGUMENTS.items())
DSML = "".join(
    f'<｜DSML｜parameter name="{k}" string="false">{v}</｜DSML｜parameter>\n'  # noqa: RUF001
    for k, v in ARGUMENTS.items()
)
PYTHON = 'find(number=12, text="3", words="a b")'
# Two calls exactly as the template of the family renders them.
OTHERS = {
    "Qwen3-Coder": f"<tool_call>\n<function=find>{XML}</function>\n</tool_call>\n" * 2,
    "Qwen3-Coder without tags": f"<function=find>{XML}</function>\n" * 2,
    "Seed-OSS": f"<seed:tool_call>\n<function=find>\n{XML}\n</function>\n</seed:tool_call>" * 2,
    "MiniMax-M2": "<minimax:tool_call>\n"
    + f'<invoke name="find">\n{NAMED}</invoke>\n' * 2
    + "</minimax:tool_call>",
    "DeepSeek V3.2": f'<｜DSML｜invoke name="find">\n{DSML}</｜DSML｜invoke>\n' * 2,  # noqa: RUF001
    "DeepSeek V3.1": f"<｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>" * 2,  # noqa: RUF001
    "MiniMax-M1": f"<tool_calls>\n{OBJECT}\n{OBJECT}\n</tool_calls>",
    "Apriel": f"<tool_calls>[{OBJECT}, {OBJECT}]</tool_calls>",
    "Nemotron Nano v2": f"<TOOLCALL>[{OBJECT}, {OBJECT}]</TOOLCALL>",
    "Phi-4-mini": f"<|tool_call|>[{OBJECT}, {OBJECT}]<|/tool_call|>",
    "Mistral 3": f"[TOOL_CALLS]find[CALL_ID]abcdefgh0[ARGS]{JSON}" * 2,
    "Llama 4": f"<|python_start|><|python_end|>{OBJECT}{OBJECT}".replace("arguments", "parameters"),
    "Llama 4 in Python": f"[{PYTHON}, {PYTHON}]",
    "Llama 4 with marks": f"<|python_start|>[{PYTHON}, {PYTHON}]<|python_end|>",
    "xLAM": f"[{OBJECT}, {OBJECT}]",
    "gpt-oss": f" to=functions.find <|constrain|>json<|message|>{JSON}<|call|>" * 2,
    "FunctionGemma": "<start_function_call>call:find{number:12,text:<escape>3<escape>,"
    "words:<escape>a b<escape>}<end_function_call>" * 2,
}


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_other_families(text: str) -> None:
    assert answers(text, parse_any) == [RIGHT, RIGHT]
    cut_off = parse_any(text[: text.rindex("a b") + 2])
    assert [bool(call.error) for call in cut_off] in ([False, True], [True])


@pytest.mark.parametrize("family", PARSED)
def test_transformers_parser_reads_the_same_calls(family: str) -> None:
    from trl import add_response_schema

    tok = add_response_schema(tokenizer(template(family)))
    parts = rendered(template(family))
    assert parts is not None
    start, text, _ = parts
    message = tok.parse_response(text, prefix=start, tools=TOOLS)
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "find", "arguments": ARGUMENTS}
    ]
    _, _, calls = read_by_template(tok, start, text)
    assert answers("", lambda _: calls) == [RIGHT]
    for length in range(text.index("find") + 4, text.index("a b") + 3):
        calls = read_by_template(tok, start, text[:length])[2]
        assert [call for call in calls if not call.error] == []  # transformers alone makes them


# A format that only the tokenizer's response template describes; "!" ends a turn.
UNKNOWN = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{% for c in m.tool_calls or [] %}@{{ c.function.name }}"
    " {{ c.function.arguments | tojson }};{% endfor %}{{ m.content }}!{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
FIELDS = {
    "tool_calls": {
        "open_pattern": r"@(?P<name>\w+) ",
        "close": ";",
        "repeats": True,
        "content": "json",
        "transform": CALL,
    },
    "content": {"close": "!", "content": "text"},
}


def test_an_unknown_format_needs_a_response_template() -> None:
    tok = tokenizer(UNKNOWN)
    turns = [f"I look.@find {JSON};@find {JSON};!", '@find {"number": 1!', "done!"]
    script = [[tok(turn)["input_ids"]] for turn in turns]
    ids = torch.tensor([[3, 4]])
    batch = PromptBatch(
        ids=ids, mask=ids > 0, group=torch.zeros(1).long(), row=torch.zeros(1).long(),
        columns={"prompt": [QUESTION]},
    )  # fmt: skip
    responses: list[Response] = []

    class Finds(ToolEnvironment):
        def step(self, response: Response) -> Any:
            responses.append(response)
            return super().step(response)

    def play() -> Any:
        rollouts = EnvironmentRollouts(ScriptedRollouts(script), lambda: Finds([find]), tok)
        return rollouts.generate(
            batch, sampling=Sampling(max_new_tokens=999, stop_ids=(ord("!"),)), seed=0
        )

    with pytest.raises(ConfigError, match=r"that is not read back: .* response_template for"):
        play()
    tok.response_template = {"start_anchor": "<assistant>", "fields": FIELDS}
    totals = play().episodes.metrics
    names = ("tool_calls", "invalid_calls", "tool_errors", "turns")
    assert [totals[f"environment/{name}"][0] for name in names] == [3, 1, 1, 3]
    assert [response.text for response in responses] == ["I look.", "", "done"]
