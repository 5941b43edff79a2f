"""Rows of the table of sample completions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kedge.reporting.completions import completion_rows
from kedge.testing import ConstantReward

from .text_toys import rollout_of, word_tokenizer


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([("user", "w3")], "w3"),
        ([("system", "w9"), ("user", "w3")], "[system] w9\n[user] w3"),
        ([], "w3 w4"),  # a prompt of tokens
    ],
)
def test_the_table_shows_a_conversation_without_what_its_template_adds(messages, shown) -> None:
    rollout = rollout_of([([3, 4], [5])])
    if messages:
        prompt = [{"role": role, "content": text} for role, text in messages]
        prompts = replace(rollout.prompts, columns={"prompt": [prompt]})
        rollout = replace(rollout, prompts=prompts)
    (row,) = completion_rows([(rollout, ConstantReward().score(rollout))], word_tokenizer())
    assert row["query"] == shown
