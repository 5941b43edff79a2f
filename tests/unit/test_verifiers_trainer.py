"""Verifiers where trainers use them: among the reward functions of a mixture."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.errors import RewardError
from kedge.rewards import RewardFunction, TextCache
from kedge.rewards.build import load_function
from kedge.verifiers import by_column, gsm8k, math_verifier, r1_style_format

from .text_toys import EOS, rollout_of, word_tokenizer

WORDS = ["4", "5", "answer", "</think>", "<answer>", "</answer>"]
PAIRS = [([5], [3, EOS]), ([5], [4, EOS]), ([5], [6, 7, 3, 8, EOS])]


def make(function: Any, **options: Any) -> RewardFunction:
    return RewardFunction(function, TextCache(word_tokenizer(WORDS)), **options)


@pytest.mark.parametrize(
    ("function", "name", "scores"),
    [
        (gsm8k, "gsm8k", [1.0, 0.0, 1.0]),
        (math_verifier(symbolic=False), "math", [1.0, 0.0, 1.0]),
        (r1_style_format, "r1_style_format", [0.0, 0.0, 1.0]),
        (load_function("kedge.verifiers:gsm8k"), "gsm8k", [1.0, 0.0, 1.0]),
    ],
)
def test_a_verifier_is_a_reward_function(function: Any, name: str, scores: list[float]) -> None:
    judged = make(function).score(rollout_of(PAIRS, ground_truth=["4", "4", "4"]))
    assert judged.scores.tolist() == scores
    assert judged.components[name].tolist() == scores
    assert judged.valid.all()


def test_an_unknown_verifier_stops_training() -> None:
    columns = {"dataset": ["gsm8k", "gsm9k", "gsm8k"], "ground_truth": ["4"] * 3}
    with pytest.raises(RewardError, match=r"'gsm9k'.*on row 1"):
        make(by_column()).score(rollout_of(PAIRS, **columns))
    dropped = make(by_column(), on_error="drop").score(rollout_of(PAIRS, **columns))
    assert dropped.valid.tolist() == [True, False, True]
