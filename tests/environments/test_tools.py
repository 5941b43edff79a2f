"""Functions as tools, classes whose methods are tools, and the formats of calls."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from functools import partial
from typing import Any, Literal

import pytest
import torch

from kedge.environments import EnvironmentRollouts, Response, ToolEnvironment, tool_environments
from kedge.environments.rollout import FunctionRollouts
from kedge.environments.tool_calls import parse_any, tool_parser
from kedge.environments.tools import check_arguments, tool_schema
from kedge.records.errors import RolloutError
from kedge.records.protocols import EnvironmentInfo
from kedge.records.types import Metrics, PromptBatch, Sampling, ToolCall
from kedge.testing import ScriptedRollouts
from tests.environments.families import FAMILIES, tokenizer
from tests.environments.toys import Echo, prompts, sampling, split_limits


def calculator(a: float, b: float, operation: str = "add") -> float:
    """Compute with two numbers.

    Args:
        a: The first number.
        b: The second number.
        operation: One of add, multiply.
    """
    return {"add": a + b, "multiply": a * b}[operation]


async def search(query: str) -> str:
    """Search for text.

    Args:
        query: What to look for.
    """
    await asyncio.sleep(0)
    return f"found {query}"


ADD = ToolCall(name="calculator", arguments={"a": 17, "b": 25})
JSON = '{"name": "calculator", "arguments": {"a": 17, "b": 25}}'
LLAMA = JSON.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("qwen2.5", f"I add.\n<tool_call>\n{JSON}\n</tool_call>", [ADD]),
        ("qwen2.5", f"<tool_call>{JSON}</tool_call>\n<tool_call>\n{JSON}", [ADD, ADD]),
        ("qwen2.5", JSON, []),
        ("qwen2.5", "the answer is 42", []),
        ("mistral", f"[TOOL_CALLS] [{JSON}, {JSON}]", [ADD, ADD]),
        ("mistral", '[TOOL_CALLS]calculator{"a": 17, "b": 25}[TOOL_CALLS]calculator[ARGS]{"a": 1}',
         [ADD, ToolCall(name="calculator", arguments={"a": 1})]),
        ("mistral", JSON, []),
        ("llama3", f"<|python_tag|>{LLAMA}", [ADD]),
        ("llama3", f"{LLAMA}; {LLAMA}", [ADD, ADD]),
        ("llama3", LLAMA, [ADD]),
        ("llama3", "{not a call}", []),
        ("llama3", "the answer is 42", []),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_format_of_the_template(
    family: str, text: str, calls: list[ToolCall]
) -> None:
    template = FAMILIES[family].template
    if family == "qwen2.5":
        template += "<tool_call>"
    if family == "mistral":
        template += "[TOOL_CALLS]"
    assert list(tool_parser(template)(text)) == calls
    if calls:
        assert list(parse_any(text)) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>[1, 2]</tool_call>", 'an object with "name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("[TOOL_CALLS] [{]", "not valid JSON"),
        ("[TOOL_CALLS]f[ARGS]{1}", "not valid JSON"),
        ("<|python_tag|>print(1)", "not valid JSON"),
        ("[f(x=g())]", "string on line 1: <ast.Call object>"),  # the same in every run
        ("[f(3)]", "arguments must have names"),
        ("[f(x={[]: 1})]", "unhashable type: 'list'"),
        ("[f(x=" + "(" * 5_000 + ")]", "not a list of calls"),
        ("[f(x='\ud800')]", "surrogates not allowed"),
    ],
)
def test_a_call_that_cannot_be_read_has_an_error(text: str, problem: str) -> None:
    (call,) = parse_any(text)
    assert problem in call.error


@pytest.mark.parametrize("head", ["", "<function=a>" + "</parameter>" * 2000])
@pytest.mark.parametrize(
    "unit",
    [
        *("to=functions.a ", "<function=", "<function=a>", "<parameter=a>", "<parameter=", "{} "),
        *("<｜tool▁call▁begin｜>", '<parameter name="a"', '<invoke name="a">', "[TOOL_CALLS]"),  # noqa: RUF001
    ],
)
def test_time_to_read_calls_is_linear_in_the_text(unit: str, head: str) -> None:
    def seconds(characters: int) -> float:
        text = head + unit * (characters // len(unit))
        begin = time.thread_time()
        for parse in (parse_any, *map(tool_parser, (unit, "<tool_call>", "to=functions."))):
            parse(text)
        return time.thread_time() - begin

    seconds(10_000)
    small = min(seconds(40_000) for _ in range(3))
    large = min(seconds(160_000) for _ in range(3))
    assert large < 10 * max(small, 0.02)  # of 4 for linear, of 16 for quadratic time


@pytest.mark.parametrize("arguments", ['""', "null", '" "', "{}"])
def test_calls_without_arguments_run(arguments: str) -> None:
    def now() -> str:
        """The time."""
        return "noon"

    call = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    rollout, read = played("qwen2.5", [call, "it is noon"], tool_environments([now]))
    assert "noon" in read[1][len(read[0]) + len(call) :]
    metrics = Metrics(rollout.episodes.metrics).means()
    assert metrics["environment/invalid_calls"] == metrics["environment/tool_errors"] == 0.0


def played(
    family: str, turns: list[str], make: Any, *, columns: Any = None, **options: Any
) -> tuple[Any, list[str]]:
    """An episode in which the policy says ``turns``; the rollout, and what it read each turn."""
    tok = tokenizer(family)
    stop = tok.convert_tokens_to_ids(FAMILIES[family].end)
    script = [[[*tok(t, add_special_tokens=False)["input_ids"], stop]] for t in turns]
    read: list[str] = []

    class Scripted(ScriptedRollouts):
        def generate(self, batch: PromptBatch, **rest: Any) -> Any:
            read.append(tok.decode(batch.ids[0][batch.mask[0]]))
            return super().generate(batch, **rest)

    prompt = [{"role": "user", "content": "what is 17 + 25?"}]
    ids = torch.tensor([[3, 4]])
    batch = PromptBatch(
        ids=ids, mask=ids > 0, group=torch.zeros(1).long(), row=torch.zeros(1).long(),
        columns={"prompt": [prompt], **(columns or {})},
    )  # fmt: skip
    limits, others = split_limits(options)
    play = EnvironmentRollouts(Scripted(script), make, tok, limits, **others)
    wanted = Sampling(max_new_tokens=9999, stop_ids=(stop,))
    return play.generate(batch, sampling=wanted, seed=0), read


CALLS = {
    "qwen2.5": f"<tool_call>\n{JSON}\n</tool_call>",
    "llama3": LLAMA,
    "mistral": f"[TOOL_CALLS] [{JSON}]",
}


@pytest.mark.parametrize("family", CALLS)
def test_a_tool_answers_in_the_format_of_the_template(family: str) -> None:
    rollout, read = played(
        family, [CALLS[family], "the answer is 42"], tool_environments([calculator])
    )
    assert "42" in read[1][len(read[0]) + len(CALLS[family]) :]
    if family != "llama3":  # the shape of the template in the tests shows no tools
        assert "Compute with two numbers." in read[0]
    metrics = Metrics(rollout.episodes.metrics).means()
    assert metrics["environment/tool_calls"] == 1.0
    assert metrics["environment/tool_errors"] == 0.0
    assert metrics["environment/turns"] == 2.0
    assert bool(rollout.terminated[0])


@pytest.mark.parametrize(
    ("call", "answer", "invalid"),
    [
        ('{"name": "compute"}', "Error: there is no tool 'compute'; the tools are: calculator", 0),
        ('{"name": "calculator", "arguments": {"a": 1}}',
         "Error: calculator needs the argument 'b'", 0),
        ('{"name": "calculator", "arguments": {"a": 1, "b": 2, "c": 3}}',
         "Error: calculator has no argument 'c'; it has: a, b, operation", 0),
        ('{"name": "calculator", "arguments": {"a": "2", "b": 3}}',
         'Error: the argument \'a\' of calculator must match {"type": "number"}, got "2"', 0),
        ('{"name": "calculator", "arguments": {"a": 1, "b": 2, "operation": "x"}}',
         "Error: KeyError: 'x'", 0),
        ('{"name": "calculator", "arguments": {"a": "\\ud800", "b": 3}}', 'got "?"', 0),
        ("{1}", "Error: the tool call is not valid JSON", 1),
    ],
)  # fmt: skip
def test_wrong_calls_are_answered_in_words(call: str, answer: str, invalid: int) -> None:
    turns = [f"<tool_call>{call}</tool_call>", "I give up"]
    rollout, read = played("qwen2.5", turns, tool_environments([calculator, search]))
    assert answer in read[1]
    metrics = Metrics(rollout.episodes.metrics).means()
    assert metrics["environment/tool_errors"] == 1.0
    assert metrics["environment/invalid_calls"] == float(invalid)


def test_a_policy_that_never_calls_a_tool_is_seen() -> None:
    rollout, _ = played("qwen2.5", ["I give up"], tool_environments([calculator]))
    assert Metrics(rollout.episodes.metrics).means()["environment/tool_calls"] == 0


class Lookup:
    """A tool with a state."""

    def __call__(self, key: str) -> str:
        """Look a word up.

        Args:
            key: The word.
        """
        return f"value of {key}"


def test_partials_and_objects_are_tools() -> None:
    double = partial(calculator, operation="multiply", b=2)
    (schema,) = ToolEnvironment([double]).tools
    assert schema["function"]["name"] == "calculator"
    assert list(schema["function"]["parameters"]["properties"]) == ["a"]
    calls = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{{arguments}}}}}</tool_call>'
        for name, arguments in (("calculator", '"a": 21'), ("Lookup", '"key": "door"'))
    )
    _, read = played("qwen2.5", [calls, "done"], tool_environments([double, Lookup()]))
    assert "42" in read[1]
    assert "value of door" in read[1]


def test_tools_of_a_turn_run_together() -> None:
    """Of eight calls, the four in threads are at work at once, and so are the four async ones."""
    four, began, all_began = threading.Barrier(4, timeout=60), list[str](), asyncio.Event()

    def slow(word: str) -> str:
        """Wait.

        Args:
            word: Any.
        """
        four.wait()
        return word

    async def later(word: str) -> str:
        """Wait.

        Args:
            word: Any.
        """
        began.append(word)
        if len(began) == 4:
            all_began.set()
        await asyncio.wait_for(all_began.wait(), 60)
        return word

    call = '<tool_call>{{"name": "{}", "arguments": {{"word": "w{}"}}}}</tool_call>'
    turn = "".join(call.format(("slow", "later")[i % 2], i) for i in range(8))
    _, read = played("qwen2.5", [turn, "done"], tool_environments([slow, later]))
    answers = read[1][len(read[0]) + len(turn) :]
    assert [answers.count(f"w{i}") for i in range(8)] == [1] * 8
    assert [answers.index(f"w{i}") for i in range(8)] == sorted(
        answers.index(f"w{i}") for i in range(8)
    )


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, [3, 3.0], [3.5, "3", True, None]),
        (bool, [True], [1, "true"]),
        (str | None, ["a", None], [1, ["a"]]),
        (list[int], [[], [1, 2]], [["a"], "a", {"a": 1}]),
        (dict[str, float], [{}, {"a": 1}], [{"a": "b"}, [1]]),
        (Literal["up", "down"], ["up"], ["left", 1, None]),
        (int | list[str], [1, ["a"]], ["a", [1]]),
        (tuple[int, str], [[1, "a"]], [[1], ["a", 1]]),
        (Any, [1, "a", None, []], []),
    ],
)
def test_arguments_match_their_hints(hint: Any, right: list[Any], wrong: list[Any]) -> None:
    def tool(x):  # type: ignore[no-untyped-def]
        """Do.

        Args:
            x: It.
        """

    tool.__annotations__ = {"x": hint}
    tool.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, annotation=hint)]
    )
    schema = tool_schema(tool)
    for value in right:
        assert check_arguments(tool, schema, {"x": value}) == ""
    for value in wrong:
        assert "must match" in check_arguments(tool, schema, {"x": value})


class Counter:
    """TRL's convention: public methods are tools, reset takes the columns of the row."""

    def reset(self, prompt: Any = None, start: int = 0, **columns: Any) -> str | None:
        self.value = start
        return f" Start at {start}." if start else None

    def increment(self, by: int) -> str:
        """Add to the counter.

        Args:
            by: How much.
        """
        self.value += by
        return f"now {self.value}"

    def _hidden(self) -> None:
        raise AssertionError

    def get_reward(self) -> float:
        return float(self.value)


class AsyncCounter(Counter):
    async def increment(self, by: int) -> str:  # type: ignore[override]
        """Add to the counter.

        Args:
            by: How much.
        """
        return Counter.increment(self, by)

    async def get_reward(self) -> float:  # type: ignore[override]
        return Counter.get_reward(self)


INCREMENT = '<tool_call>{"name": "increment", "arguments": {"by": 2}}</tool_call>'


@pytest.mark.parametrize("factory", [Counter, AsyncCounter])
def test_environment_factory(factory: Any) -> None:
    rollout, read = played(
        "qwen2.5",
        [INCREMENT, INCREMENT, "done"],
        tool_environments(environment_factory=factory),
        columns={"start": [3]},
    )
    assert "what is 17 + 25? Start at 3.<|im_end|>" in read[0]  # appended as in TRL
    assert "increment" in read[0]
    assert "_hidden" not in read[0]
    assert "get_reward" not in read[0]
    assert "now 5" in read[1]
    assert rollout.episodes.rewards.sum() == 7
    assert rollout.episodes.rewards[0, int(rollout.loss_mask[0].nonzero().max())] == 7


def test_an_episode_cut_off_is_scored_once() -> None:
    for options, turns in (({"max_turns": 2}, 2), ({}, 3)):
        rollout, _ = played(
            "qwen2.5",
            [INCREMENT] * turns,
            tool_environments(environment_factory=Counter, max_iterations=2),
            **options,
        )
        assert rollout.episodes.rewards.sum() == 4
        assert int(rollout.episodes.turn.max()) + 1 == turns
        assert rollout.terminated.tolist() == [False]  # by either limit
        assert rollout.episodes.metrics["environment/ended_turn_limit"] == (1.0, 1.0)


class Down(Counter):
    """Its server is down: it cannot be called, and cannot say the reward."""

    def increment(self, by: int) -> str:
        """Add to the counter.

        Args:
            by: How much.
        """
        raise RolloutError("no server")

    async def get_reward(self) -> float:  # type: ignore[override]
        raise ValueError("no verdict")


def test_failures_of_a_server_are_not_trained_on() -> None:
    make = tool_environments(environment_factory=Down)
    for turn, *failure in (
        (INCREMENT, "environment_error", "RolloutError: no server"),
        ("done", "grader_error", "ValueError: no verdict"),
    ):
        episodes = played("qwen2.5", [turn], make, on_env_error="drop")[0].episodes
        assert not episodes.valid[0]
        assert [episodes.columns[name][0] for name in ("ending", "error")] == failure


def test_a_dict_of_factories_is_chosen_by_a_column() -> None:
    make = tool_environments(environment_factory={"count": Counter, "other": AsyncCounter})
    rollout, _ = played("qwen2.5", [INCREMENT, "x"], make, columns={"environment": ["count"]})
    assert rollout.episodes.rewards.sum() == 2
    with pytest.raises(RolloutError, match="must name one of count, other, got 'chess'"):
        played("qwen2.5", ["x"], make, columns={"environment": ["chess"]})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({}, ""),
        ({"completion_ids": [[5]]}, "1 entries of 'completion_ids' for 2 prompts"),
        ({"completion_ids": [[], [5]]}, "no token for prompt 0"),
        ({"prompt_ids": [[3, 32], [4]]}, "prompt_ids of rollout_func holds token 32, but the voc"),
        ({"completion_ids": [[5, -1, 0], [7] * 4]}, "completion_ids of rollout_func holds token -"),
        ({"completion_ids": [[5, 1.5, 0], [7] * 4]}, "ids are integers from 0 to 31"),
        ({"logprobs": [[0.0], [0.0]]}, "1 entries of 'logprobs' for the 3 tokens"),
    ],
)
def test_rollout_func(wrong: dict[str, Any], text: str) -> None:
    def rollout_func(texts: list[Any], trainer: Any) -> dict[str, Any]:
        assert trainer == "the trainer"
        return {
            "prompt_ids": [[3, 4]] * len(texts),
            "completion_ids": [[5, 6, 0], [7, 8, 9, 10]],
            "logprobs": [[-1.0, 0.0, -2.0], [-1.0] * 4],
            "env_mask": [[1, 0, 1], [1, 1, 1, 1]],
            "game": ["won", "lost"],
        } | wrong

    play = FunctionRollouts(rollout_func, lambda: "the trainer", pad_id=1, vocabulary=lambda: 32)
    if wrong:
        with pytest.raises(RolloutError, match=text):
            play.generate(prompts(2), sampling=sampling(), seed=0)
        return
    rollout = play.generate(prompts(2), sampling=sampling(), seed=0)
    assert rollout.ids.tolist() == [[5, 6, 0, 1], [7, 8, 9, 10]]
    assert rollout.loss_mask.tolist() == [[True, False, True, False], [True] * 4]
    assert rollout.terminated.tolist() == [True, False]
    assert rollout.prompts.ids.tolist() == [[3, 4]] * 2
    assert rollout.prompts.columns["game"] == ["won", "lost"]
    play = FunctionRollouts(lambda *_: {"prompt_ids": []}, lambda: None, pad_id=1)
    with pytest.raises(RolloutError, match="missing: completion_ids, logprobs"):
        play.generate(prompts(2), sampling=sampling(), seed=0)


def test_an_environment_may_have_its_tools() -> None:
    class Shop(Echo):
        info = EnvironmentInfo(
            tools=[{"type": "function", "function": {"name": "buy", "parameters": {}}}]
        )

        def reset(self, **options: Any) -> Any:
            return None, {}

        def step(self, response: Response) -> Any:
            (call,) = response.tool_calls
            return None, 1.0 if call.name == "buy" else 0.0, True, False, {}

    rollout, read = played("qwen2.5", ['<tool_call>{"name": "buy"}</tool_call>'], Shop)
    assert '"buy"' in read[0]
    assert rollout.episodes.rewards.sum() == 1
