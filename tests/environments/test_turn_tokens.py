"""Joined token ids are those of the chat template, and the policy's tokens are never touched."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from kedge.environments import EnvironmentRollouts, EpisodeLimits
from kedge.environments.turn_tokens import TurnTokens
from kedge.records.errors import DataError, RolloutError
from kedge.records.types import PromptBatch, Sampling
from kedge.testing import ScriptedRollouts
from tests.environments.families import FAMILIES, tokenizer
from tests.environments.test_tools import calculator

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
TALK = [
    {"role": "user", "content": "go north and open the red door"},
    {"role": "assistant", "content": "the key is in the room"},
    {"role": "user", "content": "what is the sum of 17 and 25?"},
    {"role": "assistant", "content": "the answer is 42"},
    {"role": "user", "content": "\n odd   blanks, a line\nand 100!"},
]
WITH_TOOL = [
    TALK[0],
    {"role": "assistant", "content": CALL, "tool_calls": []},
    {"role": "tool", "name": "calculator", "content": "42", "tool_call_id": "000000001"},
    {"role": "assistant", "content": "the answer is 42"},
    TALK[4],
]


def encoded(tok: Any, text: str) -> list[int]:
    return list(tok(text, add_special_tokens=False)["input_ids"])


def rendered(tok: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return encoded(tok, text)


def joined(
    name: str, messages: list[dict[str, str]], *, end: bool = True, tools: Any = None
) -> list[int]:
    """The conversation as EnvironmentRollouts joins it, the policy sampling the contents."""
    tok, family = tokenizer(name), FAMILIES[name]
    tokens, prompt = TurnTokens(tok), messages[:1]
    ids = tokens.prompt(prompt, rendered(tok, prompt), None, tools=tools)
    stop = tok.convert_tokens_to_ids(family.end)
    for said, answer in zip(messages[1::2], messages[2::2], strict=True):
        text = f" {said['content']}" if name == "mistral" else said["content"]
        ids += sampled(tok, text) + [stop] * end
        ids += tokens.between(prompt, [answer], last=ids[-1], stopped=end)
    return ids


def sampled(tok: Any, content: str) -> list[int]:
    """Tokens of the content in the place where the template has it."""
    special = tok.all_special_tokens[0]
    return encoded(tok, special + content)[1:]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("end", [True, False])
def test_joined_ids_are_those_of_the_template(name: str, end: bool) -> None:
    """Also where a turn was cut off: the template's own end of turn closes it."""
    tok = tokenizer(name)
    assert joined(name, TALK, end=end) == rendered(tok, TALK)


@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if family.tool_role])
def test_tool_messages_are_those_of_the_template(name: str) -> None:
    talk = [*WITH_TOOL]
    if name == "llama3":  # its template takes a message with ``tool_calls`` for one call
        talk[1] = {"role": "assistant", "content": CALL}
    assert joined(name, talk) == rendered(tokenizer(name), talk)


@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if not family.tool_role])
def test_templates_without_tool_messages_get_user_messages(name: str) -> None:
    as_user = [*WITH_TOOL]
    as_user[2] = {"role": "user", "content": "calculator: 42"}
    assert joined(name, WITH_TOOL) == rendered(tokenizer(name), as_user)


def test_tools_are_shown_once() -> None:
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    for name in ("qwen2.5", "mistral"):
        tok = tokenizer(name)
        text = tok.decode(joined(name, TALK, tools=tools))
        assert text.count("calculator") == 1
        assert text.startswith(tok.decode(rendered(tok, TALK[:1], tools=tools)))


@pytest.mark.parametrize(
    ("name", "system", "warned"),
    [("phi3", "You are Phi.", True), ("phi3", "Use calculator.", False), ("qwen2.5", "", False)],
)
@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "calculator"}},
        {"type": "function", "name": "calculator"},
        {"name": "calculator", "parameters": {}},
        calculator,
    ],
)
def test_tools_that_a_template_does_not_show_are_named_once(
    name: str, system: str, warned: bool, tool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    turns, tools = TurnTokens(tokenizer(name)), [tool]
    talk = [{"role": "system", "content": system}, *TALK[:1]]
    for _ in range(2):
        turns.prompt(talk if system else TALK[:1], [], None, tools=tools)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warned
    assert all("does not show the tools calculator" in message for message in messages)


def test_tokens_of_the_policy_are_never_tokenized_again() -> None:
    """The policy spells words letter by letter, as the tokenizer never would."""
    tok = tokenizer("qwen2.5")
    stop = tok.convert_tokens_to_ids("<|im_end|>")
    letters = [tok.convert_tokens_to_ids(c) for c in "theanswer"]
    assert encoded(tok, "theanswer") != letters
    turns = [[*letters, stop], [*letters[:3], stop]]

    class Asks:
        def reset(self, *, seed: int, options: Any) -> Any:
            return "what is the sum?", {}

        def step(self, response: Any) -> Any:
            assert response.text in ("theanswer", "the")
            return "again", 1.0, False, False, {}

    seen: list[list[int]] = []

    class Scripted(ScriptedRollouts):
        def generate(self, prompts: PromptBatch, **options: Any) -> Any:
            seen.append(prompts.ids[0][prompts.mask[0]].tolist())
            return super().generate(prompts, **options)

    prompt = [{"role": "user", "content": "go north"}]
    ids = torch.tensor([rendered(tok, prompt)])
    batch = PromptBatch(
        ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), group=torch.zeros(1).long(),
        row=torch.zeros(1).long(), columns={"prompt": [prompt]},
    )  # fmt: skip
    limits = EpisodeLimits(max_turns=2)
    play = EnvironmentRollouts(Scripted([[turn] for turn in turns]), Asks, tok, limits)
    rollout = play.generate(batch, sampling=Sampling(max_new_tokens=99, stop_ids=(stop,)), seed=0)
    assert seen[1][: len(seen[0]) + len(turns[0])] == seen[0] + turns[0]
    assert rollout.ids[0][rollout.loss_mask[0]].tolist() == turns[0] + turns[1]


def test_first_observations() -> None:
    tok = tokenizer("qwen2.5")
    tokens = TurnTokens(tok)
    prompt, ids = TALK[:1], rendered(tok, TALK[:1])
    assert tokens.prompt(prompt, ids, None) == ids
    said = [{"role": "user", "content": "go north and open the red door\n\nroom 1"}]
    assert tokens.prompt(prompt, ids, "room 1") == rendered(tok, said)
    assert tokens.prompt(prompt, ids, " room 1", separator="") == rendered(
        tok, [{"role": "user", "content": "go north and open the red door room 1"}]
    )
    system = [{"role": "system", "content": "rules"}]
    both = [*system, {"role": "user", "content": "room 1"}]
    assert tokens.prompt(system, rendered(tok, system), "room 1") == rendered(tok, both)
    assert tokens.prompt(prompt, ids, TALK[1:3]) == rendered(tok, TALK[:3])
    assert tokens.prompt("text", ids, "room 1") == ids + encoded(tok, "\n\nroom 1")
    with pytest.raises(DataError, match="tools need prompts of chat messages"):
        tokens.prompt("text", ids, None, tools=[{}])
    with pytest.raises(RolloutError, match=r"or tool_calls., got a str: 'hello'"):
        tokens.prompt(prompt, ids, ["hello"])


def test_observations_that_cannot_be_rendered_are_said() -> None:
    tok = tokenizer("qwen2.5")
    tokens, prompt = TurnTokens(tok), TALK[:1]
    stop = tok.convert_tokens_to_ids("<|im_end|>")
    between = partial(tokens.between, prompt, last=stop, stopped=True)
    assert between([]) == between(None)  # an empty user message
    assert tok.decode(between([])).count("user") == 1
    parts = [{"type": "text", "text": "a red"}, {"type": "text", "text": "door"}]
    whole = between([{"role": "user", "content": "a red\ndoor"}])
    assert between([{"role": "user", "content": parts}]) == whole
    for content in ([{"type": "image", "image": "x.png"}], [*parts, {"type": "image_url"}]):
        with pytest.raises(RolloutError, match=r"part of type 'image.*images are not supported"):
            between([{"role": "user", "content": content}])
    with pytest.raises(RolloutError, match="must be text, messages or token ids, got b'door'"):
        between(b"door")
    with pytest.raises(RolloutError, match="chat messages only if the prompts"):
        tokens.between("text", TALK[:1], last=stop, stopped=True)
