"""Earlier turns without their reasoning: new contexts where the chat template leaves it out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kedge.environments import EnvironmentRollouts, EpisodeLimits, Response
from kedge.environments.tools import ToolEnvironment
from kedge.loop import updater
from kedge.records.errors import ConfigError
from kedge.records.protocols import EnvironmentInfo, NewContext
from kedge.records.types import PromptBatch, Rollout, Sampling
from kedge.rollout.embedded.generation import DecodeLoop
from kedge.testing import ScriptedRollouts, tiny_policy, tiny_reward_model
from tests.e2e.small import PROMPTS, rows
from tests.environments.test_families import FOLDER, find, template, without_end
from tests.environments.test_families import rendered as rendered_calls
from tests.environments.test_new_contexts import logprobs_of, record
from tests.environments.toys import Echo, played

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the templates of trl")
MARKS = ("<stop>", "<pad>", "<?>", "<think>", "</think>")
LETTERS = "\n .<>|/_abcdefghijklmnopqrstuvwxyz"
ASCII = "\n" + "".join(map(chr, range(32, 127))) + "｜▁"  # noqa: RUF001
CHAT = [
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": f"do {x}"}]
    for x in "abcde"
]


def letters(family: str = "qwen3", *, alphabet: str = LETTERS) -> PreTrainedTokenizerFast:
    """One token per letter and per mark, and the template of a family."""
    vocabulary = {token: i for i, token in enumerate([*MARKS, *alphabet])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<?>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS[3:]])
    text = template(family).replace("<|im_end|>", "<stop>")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<stop>", pad_token="<pad>", unk_token="<?>",
        chat_template=text,
    )  # fmt: skip


def rendered(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


PLANS = [  # of a turn: with reasoning, with reasoning that is cut off, without; "." is any letter
    ["<think>", "\n", ".", ".", "\n", "</think>", "\n", "\n", ".", "<stop>"],
    ["<think>", *"........", "<stop>"],
    [*".........", "<stop>"],
]


@pytest.fixture
def thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model samples the letters of its turns; the random numbers choose a plan for each."""
    real, tokenizer = DecodeLoop._draw, letters()
    plans = torch.tensor([tokenizer.convert_tokens_to_ids(plan) for plan in PLANS])
    first = tokenizer.convert_tokens_to_ids("a")

    def draw(self: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        token = first + real(self, logits)[0] % 26
        kind = (self._u[:, 0] * 6 - 3).clamp(min=0).long()  # of six turns four, one and one
        planned = plans[kind, self._t.clamp(max=9)]
        token = torch.where(planned == tokenizer.convert_tokens_to_ids("."), token, planned)
        logprob = logits.log_softmax(-1).gather(1, token[:, None])
        return token, torch.cat([token[:, None], logprob.view(torch.int32).long()], 1)

    monkeypatch.setattr(DecodeLoop, "_draw", draw)


def thinking(*, family: str = "qwen3", **options: Any) -> Any:
    """A PPO trainer with a family's template."""
    parts = {
        "model": tiny_policy(vocab_size=64, max_positions=1024, initializer_range=0.2),
        "processing_class": letters(family),
        "train_dataset": [{"prompt": prompt} for prompt in CHAT],
        "environment": Talk,
        "drop_reasoning": True,
        "response_length": 700,
        "max_turn_tokens": 24,
        "temperature": 1.0,
        "learning_rate": 1e-5,
    }
    return played(**parts | options)


class Talk(Echo):
    """Says something after every turn; only the last one is rewarded."""

    def reset(self, *, seed: int, options: Any) -> Any:
        super().reset(seed=seed, options=options)
        return None, {}

    def step(self, response: Response) -> Any:
        _, _, done, *rest = super().step(response)
        return self.say("and w w"), float(done), done, *rest

    def say(self, text: str) -> Any:
        return text


class ToolTalk(Talk):
    """Answers as a tool, but after every second turn as the user."""

    def say(self, text: str) -> Any:
        role = "user" if self.turn % 2 == 0 else "tool"
        return [{"role": role, "name": "find", "content": text}]


def read_and_written(rollout: Rollout, row: int) -> list[tuple[bool, list[int], list[int]]]:
    """Of each turn: whether a context begins with it, what the policy read, and what it wrote."""
    assert rollout.episodes is not None
    length, found = int(rollout.response_mask[row].sum()), list[Any]()
    ids, turn = rollout.ids[row, :length].tolist(), rollout.episodes.turn[row, :length].tolist()
    starts = torch.zeros_like(rollout.loss_mask)
    starts = starts if rollout.context_start is None else rollout.context_start
    read, new = rollout.prompts.ids[row][rollout.prompts.mask[row]].tolist(), False
    for t, token in enumerate(ids):
        if starts[row, t]:
            read, new = [], True
        if turn[t] >= 0 and (t == 0 or turn[t] != turn[t - 1]):
            found.append((new, read.copy(), []))
            new = False
        if turn[t] >= 0:
            found[-1][2].append(token)
        read.append(token)
    return found


def message_of(text: str) -> dict[str, str]:
    """The message that a server with a parser of reasoning returns."""
    if not text.lstrip().startswith("<think>"):
        return {"role": "assistant", "content": text.lstrip("\n")}
    thought, _, answer = text.partition("<think>")[2].partition("</think>")
    message = {"role": "assistant", "content": answer.lstrip("\n")}
    return message | ({"reasoning_content": thought.strip()} if thought.strip() else {})


@pytest.mark.usefixtures("thinks")
@pytest.mark.parametrize("environment", [Talk, ToolTalk])
@pytest.mark.parametrize("options", [{}, {"rollout_schedule": "as_completed"}])
def test_contexts_are_those_of_the_template(
    environment: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client of a chat API would send is read, and what is trained on was read so."""
    trainer = thinking(environment=lambda: environment(4), max_lag=1, **options)
    models, trained = record(monkeypatch, trainer)
    trainer.train()
    begun, kept = 0, 0
    for rollout, _ in trained:
        assert rollout.episodes is not None
        for row in range(len(rollout)):
            messages = copy.deepcopy(rollout.prompts.columns["prompt"][row])
            texts: list[str] = []  # turns of the context
            for k, (new, read, wrote) in enumerate(read_and_written(rollout, row)):
                if k:
                    said = rollout.episodes.columns["observations"][row][k - 1]
                    messages += said
                    hidden = [x for x in texts if x.startswith("<think>")]
                    if said[0]["role"] == "tool":  # kept, but closed by the template
                        hidden = [x for x in hidden if "</think>" not in x]
                        kept += not hidden and any("</think>" in x for x in texts)
                    assert new == bool(hidden)
                if new or k == 0:
                    assert read == rendered(trainer.processing_class, messages)
                    texts.clear()
                    begun += new
                texts.append(trainer.processing_class.decode(wrote).removesuffix("<stop>"))
                messages.append(message_of(texts[-1]))
    assert (begun, kept) == ((20, 0) if environment is Talk else (10, 13))
    logged = rows(trainer)
    assert sum(row["environment/new_contexts"] for row in logged) == begun / 4
    assert max(row["rollout/logprob_gap"] for row in logged if "rollout/logprob_gap" in row) < 1e-5
    for step, (rollout, _) in enumerate(trained):
        known = [model.double() for model in models[: step + 1]]
        want = torch.stack([logprobs_of(known, rollout, i)[:, 0] for i in range(len(rollout))])
        gaps = (rollout.behavior_logprobs - want)[rollout.loss_mask].abs()
        assert float(gaps.max()) < 1e-5


@pytest.mark.usefixtures("thinks")
def test_the_return_flows_through_the_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gamma and lambda 1, every token of the first context has the reward of the third."""
    real, made = updater.make_experience, list[Any]()
    monkeypatch.setattr(
        updater, "make_experience", lambda *args: made.append((args[0], real(*args))) or made[-1][1]
    )
    thinking(gamma=1.0, lam=1.0, kl_coef=0.0, whiten_rewards=False).train()
    contexts = []
    for rollout, (experience, *_) in made:
        contexts.append(rollout.context_start.sum(1) + 1)
        returns = experience.returns[experience.value_mask]
        torch.testing.assert_close(returns, torch.ones_like(returns), rtol=0, atol=1e-5)
    assert int(torch.cat(contexts).max()) == 3


@pytest.mark.usefixtures("thinks")
def test_truncated_episodes_bootstrap_from_the_next_context() -> None:
    """V after two of three turns is the V where the third begins, in its own context."""
    value, found = tiny_reward_model(vocab_size=64, max_positions=1024), []
    for turns in (2, 3):
        made = thinking(
            environment=lambda: Talk(9), max_turns=turns, bootstrap_truncated=True,
            value_model=copy.deepcopy(value),
        ).engine  # fmt: skip
        rollout = made.rollout_engine.generate(made.source.batch(0), sampling=made.sampling, seed=0)
        outputs = made.learner.compute_logprobs(
            rollout, values=True, reference=False, full_kl=False
        )
        third = (rollout.episodes.turn == 2).int().argmax(1)
        at = outputs.values.gather(1, third[:, None])[:, 0]
        found.append(outputs.last_values if turns == 2 else at)
        assert rollout.context_start.any(1).sum() >= 2
    assert found[0].std() > 0
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_without_reasoning_nothing_changes() -> None:
    """The option draws nothing: weights are the same to the last bit."""
    weights = []
    for drops in (False, True):
        trainer = played(environment=Echo, drop_reasoning=drops)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


class Ids(Talk):
    """Answers with token ids."""

    def say(self, text: str) -> Any:
        return [7, 8]


class NewIds(Talk):
    """Goes on with token ids, which no message has."""

    def say(self, text: str) -> Any:
        return NewContext([7, 8])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"train_dataset": PROMPTS}, "it needs chat messages"),
        ({"train_dataset": [{"prompt": [*CHAT[0], message_of("so")]}]}, "it needs chat messages"),
        ({"family": "qwen3_8"}, "renders the reasoning of earlier turns"),
        ({"max_prompt_length": 30, "overlong_prompts": "truncate"}, "has cut 5 of them"),
        ({"environment": Ids}, "not with token ids"),
        ({"environment": NewIds}, "not with token ids"),
    ],
)
def test_what_cannot_be_rendered_again_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        thinking(**given).train()


# What each family's template keeps between calls of tools; before a user message it drops all.
FAMILIES = {
    **dict.fromkeys(("qwen3", "qwen3_5_think", "qwen3_6", "glm4moe"), True),
    **dict.fromkeys(("nemotron_3_nano", "lfm2_2_5", "gptoss", "gemma4", "gemma4_v5"), True),
    **dict.fromkeys(("qwen2_5", "llama3_1", "gemma4_v2"), False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_between_calls(family: str) -> None:
    """Three turns: a call, an answer, and one after the user has said something long."""
    tokenizer = letters(family, alphabet=ASCII)
    tools = ToolEnvironment([find]).tools
    prompt = [{"role": "user", "content": "Question"}]
    opened = tokenizer.decode(rendered(tokenizer, prompt, tools=tools)).endswith("<think>\n")
    before, after = ("" if opened else "<think>\n") + "why\n</think>\n\n", ""
    parts = rendered_calls(template(family))
    assert parts is not None
    call = without_end(parts[1]).removesuffix("<|im_end|>").removesuffix("<|im_end|>\n")
    if family == "gptoss":
        before = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
        after = "<|channel|>final<|message|>"
    if family.startswith("gemma4"):
        before = "<|channel>thought\nwhy\n<channel|>"
    call = call.partition("</think>")[2] or call
    call = call.strip()
    texts = [before + call, before + after + "Answer", before + after + "End"]

    class Asks:
        def __init__(self) -> None:
            self.info, self.turn = EnvironmentInfo(tools=tools), 0

        def reset(self, *, seed: int, options: Any) -> Any:
            return None, {}

        def step(self, response: Response) -> Any:
            self.turn += 1
            result = {"role": "tool", "name": "find", "content": "Result"}
            said = [result | {"tool_call_id": "abcdefghi"}] if self.turn == 1 else "Next " * 60
            return said, 0.0, self.turn == 3, False, {}

    script = [[[*tokenizer(x, add_special_tokens=False)["input_ids"], 0]] for x in texts]
    limits = EpisodeLimits(max_observation_tokens=200)
    play = EnvironmentRollouts(
        ScriptedRollouts(script), Asks, tokenizer, limits, drop_reasoning=True
    )
    ids = torch.tensor([rendered(tokenizer, prompt)])
    batch = PromptBatch(
        ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), group=torch.zeros(1).long(),
        row=torch.zeros(1).long(), columns={"prompt": [prompt]},
    )  # fmt: skip
    rollout = play.generate(batch, sampling=Sampling(max_new_tokens=9999, stop_ids=(0,)), seed=0)
    (_, _, _), (new, second, _), (newer, third, _) = read_and_written(rollout, 0)
    assert (new, newer) == (not FAMILIES[family], True)
    text = tokenizer.decode(second)
    assert ("why" in text) == FAMILIES[family]
    assert "Result" in text
    assert "a b" in text  # an argument of the call
    text = tokenizer.decode(third)
    assert "why" not in text
    told = ["Question", "a b", "Result", "Answer", "...(truncated)..."]
    assert sorted(told, key=text.index) == told
    assert [text.count(x) for x in told] == [1] * 5
