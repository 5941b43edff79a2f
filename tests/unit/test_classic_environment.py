"""TextEnvironment and TextHistory of the classic API."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kedge.classic import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    TextEnvironment,
    TextHistory,
    set_seed,
)
from kedge.environments.games import calculate


def bytes_tokenizer() -> Any:
    """One token per byte, so that stop strings are several tokens long."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def make_model(tokenizer: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 512}
    ends = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    base = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes | ends))
    return AutoModelForCausalLMWithValueHead.from_pretrained(base)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    tokenizer = bytes_tokenizer()
    return make_model(tokenizer), tokenizer


class Echo:
    def __call__(self, text: str) -> str:
        return text


def environment(parts: tuple[Any, Any], **changes: Any) -> TextEnvironment:
    options: dict[str, Any] = {"tools": [Echo()], "prompt": "Q: "}
    options |= {"reward_fn": lambda texts: [torch.tensor(float(len(t))) for t in texts]}
    return TextEnvironment(*parts, **options | changes)


class Scripted(TextEnvironment):
    """Takes the model's turns from a list."""

    turns: list[str]

    def _generate_batched(self, query_tensors: list[Any], *_: Any) -> list[Any]:
        turn = self.turns.pop(0)
        return [self._encode(turn) for _ in query_tensors]


def scripted(parts: tuple[Any, Any], turns: list[str], **changes: Any) -> TextEnvironment:
    tools = {"Calculator": calculate}
    reward = {"reward_fn": lambda texts: [float("Result=10" in text) for text in texts]}
    world = Scripted(*parts, **{"tools": tools, "prompt": "Q: "} | reward | changes)
    world.turns = turns
    return world


CALL = "<request><Calculator>13-3<call>"


def test_an_episode_with_a_tool(parts: tuple[Any, Any]) -> None:
    world = scripted(parts, [CALL, "Result=10<submit>", "never"])
    queries, responses, masks, rewards, (history,) = world.run(["13-3?"])
    assert history.text == f"Q: 13-3?{CALL}10<response>Result=10<submit>"
    assert parts[1].decode(queries[0]) == "Q: 13-3?"
    assert parts[1].decode(responses[0][masks[0] == 1]) == f"{CALL}Result=10<submit>"
    assert parts[1].decode(responses[0][masks[0] == 0]) == "10<response>"
    assert rewards == [1.0]
    assert (history.completed, history.truncated) == (True, False)
    assert len(world.turns) == 1


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("<request><Calculator>1<call>", "Tool error: '1' is not one operation like 17 + 25"),
        ("<request><Search>1<call>", "Unknown tool Search."),
        ("<request>1<call>", "Unknown tool call: <request>1<call>"),
        ("<request><Calculator>1+1<call>", "2"),
    ],
)
def test_what_tools_answer(parts: tuple[Any, Any], turn: str, answer: str) -> None:
    _, _, _, _, (history,) = scripted(parts, [turn], max_turns=1).run(["?"])
    assert history.text == f"Q: ?{turn}{answer}<response>"
    assert not history.completed


def test_how_episodes_end(parts: tuple[Any, Any]) -> None:
    world = environment(parts)

    def check(text: str, **changes: Any) -> tuple[bool, bool]:
        world.max_length = changes.pop("max_length", None)
        return world.task_end_check(TextHistory(text, torch.arange(5)), **changes)

    assert check("no call") == (False, True)
    assert check("no call", model_turn=False) == (False, False)
    assert check(CALL) == (False, False)
    assert check("x<submit>", model_turn=False) == (False, True)
    assert check(f"{CALL}</s>") == (False, True)
    assert check(CALL, max_length=4) == (True, True)
    assert check(CALL, max_length=5) == (False, False)


@pytest.mark.parametrize(("limit", "length"), [(100, 100), (1001, 1000)])
def test_long_answers_are_cut(parts: tuple[Any, Any], limit: int, length: int) -> None:
    world = environment(parts, tools={"long": lambda _: "a" * 1000}, max_tool_reponse=limit)
    history = world.step(TextHistory("<request><long>x<call>", torch.arange(3)))
    assert len(history.last_text_segment) == length + len("<response>")


def test_tools_are_named(parts: tuple[Any, Any]) -> None:
    world = environment(parts, tools=[Echo(), calculate])
    assert list(world.tools) == ["Echo", "calculate"]
    assert world.parse_tool_call("so <request><Echo>a<b>c<call>") == ("Echo", "a<b>c")
    assert world.parse_tool_call("<Echo>a<call>") == (None, None)


def test_rewards_are_checked(parts: tuple[Any, Any]) -> None:
    world = environment(parts, reward_fn=lambda texts: [1.0])
    histories = [TextHistory("a", torch.arange(3)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"one reward per episode \(2\), got 1"):
        world.compute_reward(histories)
    with pytest.raises(ValueError, match="TextEnvironment has no reward_fn"):
        environment(parts, reward_fn=None).compute_reward(histories)
    with pytest.raises(ValueError, match="must have text and tokens"):
        histories[0].append_segment("", torch.arange(3))


def test_a_turn_ends_at_a_call(parts: tuple[Any, Any]) -> None:
    """Rows stop at different places; what the model writes afterwards is left out."""
    tokenizer = parts[1]
    greedy = {"do_sample": False, "max_new_tokens": 6}
    world = environment(parts, generation_kwargs=greedy)
    prompts = [world._encode("abc"), world._encode("another one")]
    together = world._generate_batched(prompts)
    alone = [world._generate_batched([p])[0] for p in prompts]
    for first, second in zip(together, alone, strict=True):
        assert torch.equal(first, second)
    if len(set(together[0].tolist())) == 1:
        pytest.skip("the random model repeats one token")
    world.call_token = tokenizer.decode(together[0][1:3])
    cut = world._generate_batched(prompts)[0]
    assert len(cut) < len(together[0])
    assert tokenizer.decode(cut).endswith(world.call_token)


def test_the_history_is_shown(parts: tuple[Any, Any], capsys: Any) -> None:
    history = TextHistory("Hello ", torch.tensor([40, 41]))
    history.append_segment("there", torch.tensor([42]), system=False)
    history.show_text(show_legend=True)
    history.show_tokens(parts[1])
    shown = capsys.readouterr().out
    assert "Hello there" in shown
    assert "Reward: 0.0" in shown
    assert "Prompt|System|Model|Reward" in shown


@pytest.mark.filterwarnings("ignore:no dataset was given")
def test_step_trains_on_the_models_tokens() -> None:
    set_seed(0)
    tokenizer = bytes_tokenizer()
    model = make_model(tokenizer)
    trainer = PPOTrainer(PPOConfig(batch_size=4, mini_batch_size=2), model, None, tokenizer)
    world = scripted((model, tokenizer), [CALL, "Result=10<submit>"])
    queries, responses, masks, rewards, _ = world.run(["a", "bb", "ccc", "dddd"])
    scores = [torch.tensor(reward) for reward in rewards]
    stats = trainer.step(queries, responses, scores, masks)
    produced = len(CALL) + len("Result=10<submit>")
    assert stats["tokens/responses_len_mean"] == pytest.approx(len(responses[0]))
    assert masks[0].sum() == produced
