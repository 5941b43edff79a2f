"""Environments of a few lines, and trainers that play them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch

from kedge.environments import EnvironmentRollouts, EpisodeLimits, Response
from kedge.environments.pool import Calls, RunningCalls
from kedge.records.types import PromptBatch, Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy
from tests.e2e.small import small
from tests.unit.text_toys import EOS, PAD, word_tokenizer

VOCAB = 32
CHAT = [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(3, 9)]
PROMPTS = [{"prompt": p} for p in CHAT]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


class Echo:
    """Says a word of its seed each turn; rewards a turn by the words said, ends after ``turns``."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.random, self.turn = random.Random(seed), 0
        return f"w{self.random.randint(3, 31)}", {}

    def step(self, response: Response) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        words = response.text.split()
        done = self.turn >= self.turns
        observation = f"w{self.random.randint(3, 31)} w5"
        return observation, 0.1 * len(words), done, False, {"metrics": {"words": len(words)}}


class Odd(Echo):
    """Won where the seed is odd; the environment of every fifth seed fails in its second turn."""

    seeds: ClassVar[list[int]] = []  # of all episodes

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)

    def step(self, response: Response) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.turn and self.seed % 5 == 0:
            raise RuntimeError("broken")
        observation, _, done, truncated, _ = super().step(response)
        won = float(done and self.seed % 2)
        return observation, 0.5 + won, done, truncated, {"metrics": {"success": won}}


def call_all(calls: Calls, functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """The result of each function, or the exception that it raised."""
    running = RunningCalls(calls)
    for index, function in enumerate(functions):
        running.add(index, function)
    results: dict[int, Any] = {}
    while running:
        results |= running.wait(0.2)
    return [results[index] for index in range(len(functions))]


def chat_tokenizer() -> Any:
    words = ["user", "assistant", "tool", *(f"w{i}" for i in range(3, 29))]
    return word_tokenizer(words, chat_template=TEMPLATE)


def policy(**options: Any) -> Any:
    return tiny_policy("llama", vocab_size=VOCAB, max_positions=256, **options)


def engine(model: Any = None, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model or policy(), pad_id=PAD, **options)


def prompts(rows: int = 4, group: int = 1, *, chat: bool = True) -> PromptBatch:
    tokenizer = chat_tokenizer()
    raw = [CHAT[i // group % len(CHAT)] for i in range(rows)]
    texts = [
        tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in raw
    ]
    ids = torch.tensor([tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts])
    return PromptBatch(
        ids=ids,
        mask=torch.ones_like(ids, dtype=torch.bool),
        group=torch.arange(rows) // group,
        row=torch.arange(rows),
        columns={"prompt": raw if chat else texts},
    )


def split_limits(options: dict[str, Any]) -> tuple[EpisodeLimits, dict[str, Any]]:
    """The limits among the options, and the others."""
    names = {field.name for field in fields(EpisodeLimits)}
    limits = EpisodeLimits(**{name: x for name, x in options.items() if name in names})
    return limits, {name: x for name, x in options.items() if name not in names}


def rollouts(make: Any = Echo, inner: Any = None, **options: Any) -> EnvironmentRollouts:
    limits, others = split_limits(options)
    return EnvironmentRollouts(inner or engine(), make, chat_tokenizer(), limits, **others)


def sampling(**options: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 40, "stop_ids": (EOS,)} | options)


def played(**options: Any) -> Any:
    """A PPO trainer on the echo environment."""
    parts: dict[str, Any] = {
        "model": policy(),
        "processing_class": chat_tokenizer(),
        "reward_model": None,
        "train_dataset": PROMPTS,
        "response_length": 40,
        "stop_token": "eos",
        "max_turn_tokens": 5,
        "total_episodes": 8,
    }
    return small(**parts | options)
