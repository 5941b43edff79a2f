"""A row's reward is the row's own: other rows, padding, order and chunks change nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.rewards import Mixture, RewardFunction, RewardModel, TextCache
from kedge.rewards.model import join_responses, split_rows

from .text_toys import EOS, bert_reward, neox_reward, rollout_of, word_tokenizer

TOKENS = st.lists(st.integers(0, 31), min_size=1, max_size=9)
PAIRS = st.lists(
    st.tuples(TOKENS, st.lists(st.integers(0, 31), max_size=9)), min_size=1, max_size=7
)
TEXTS = TextCache(word_tokenizer())
OTHER = word_tokenizer([f"w{i}" for i in range(31, 2, -1)])


def letters(completions):
    return [float(len(text)) for text in completions]


def dense(completion_ids):
    return [[0.5 * token for token in ids] for ids in completion_ids]


SOURCES = {
    "causal": RewardModel(neox_reward(), chunk_rows=2),
    "encoder": RewardModel(bert_reward(), chunk_rows=3),
    "own tokenizer": RewardModel(neox_reward(), OTHER, texts=TEXTS, chunk_rows=2),
    "text": RewardFunction(letters, TEXTS),
    "mixture": Mixture(
        [("t", RewardFunction(letters, TEXTS), 0.5), ("d", RewardFunction(dense, TEXTS), 2.0)]
    ),
}


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=15, deadline=None)
@given(pairs=PAIRS, extra=st.integers(0, 4), pad=st.integers(0, 31))
def test_a_rows_reward_depends_on_the_row_alone(name, pairs, extra, pad):
    source = SOURCES[name]
    batch = source.score(rollout_of(pairs[::-1], pad=pad, extra=extra))
    for row, pair in enumerate(reversed(pairs)):
        alone = source.score(rollout_of([pair]))
        assert float(batch.scores[row]) == pytest.approx(float(alone.scores[0]), abs=2e-4)
        if alone.token_rewards is not None:
            count = len(pair[1])
            assert torch.equal(batch.token_rewards[row, :count], alone.token_rewards[0, :count])
            assert not batch.token_rewards[row, count:].any()


@settings(max_examples=50, deadline=None)
@given(pairs=PAIRS, extra=st.integers(0, 4), pad=st.sampled_from([EOS, 1, 7]))
def test_packed_rows_hold_every_token_and_nothing_between(pairs, extra, pad):
    ids, lengths = join_responses(rollout_of(pairs, pad=pad, extra=extra))
    for row, (prompt, response) in enumerate(pairs):
        assert ids[row, : int(lengths[row])].tolist() == [*prompt, *response]


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=40), rows=st.integers(1, 9))
def test_chunks_hold_every_row_once_longest_first(lengths, rows):
    groups = split_rows(torch.tensor(lengths), rows=rows, tokens=1000)
    order = [row for group in groups for row in group.tolist()]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    assert all(len(group) <= rows for group in groups)
    for group, after in pairwise(groups):  # cut only where it pays
        longest = lengths[int(group[0])]
        next_one = lengths[int(after[0])]
        assert len(group) == rows or (len(group) * longest >= 1000 and next_one < 0.9 * longest)
