"""A batch of prompts is a function of the step, whatever came before and however it is split."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.data import DatasetPrompts
from tests.unit.text_toys import word_tokenizer

TOKENIZER = word_tokenizer()


def source(rows, **options):
    data = {"input_ids": [[3] * (1 + i % 5) + [i] for i in range(rows)], "n": list(range(rows))}
    return DatasetPrompts(data, TOKENIZER, **options)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 23),
    per_step=st.integers(1, 8),
    generations=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=4),
)
def test_batches_are_pure_and_ranks_are_slices_of_one(rows, per_step, generations, seed, steps):
    options = {"prompts_per_step": per_step, "num_generations": generations, "seed": seed}
    whole = source(rows, **options)
    for step in steps:
        np.random.seed(step)  # the global generator must not matter
        batch = whole.batch(step)
        fresh = source(rows, **options).batch(step)
        assert torch.equal(batch.ids, fresh.ids)
        assert batch.columns == fresh.columns
        for ranks in range(1, per_step * generations + 1):
            if per_step * generations % ranks:
                continue
            parts = [
                source(rows, rank=rank, world_size=ranks, **options).batch(step)
                for rank in range(ranks)
            ]
            for name in ("ids", "mask", "group", "row"):
                joined = torch.cat([getattr(part, name) for part in parts])
                assert torch.equal(joined, getattr(batch, name))
            assert [n for part in parts for n in part.columns["n"]] == batch.columns["n"]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 23), per_step=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_every_pass_sees_every_prompt_once_in_a_new_order(rows, per_step, seed):
    prompts = source(rows, prompts_per_step=per_step, seed=seed)
    steps = -(-3 * rows // per_step)  # three passes, batches may span two of them
    seen = [n for step in range(steps) for n in prompts.batch(step).columns["n"]]
    passes = [seen[start : start + rows] for start in range(0, 3 * rows, rows)]
    assert all(sorted(one) == list(range(rows)) for one in passes)
    if rows > 12:  # equal by chance once in 10^10
        assert passes[0] != passes[1] != passes[2]
        assert source(rows, prompts_per_step=rows, seed=seed + 1).batch(0).columns["n"] != passes[0]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 23), per_step=st.integers(1, 30), step=st.integers(0, 9))
def test_without_shuffling_the_order_is_the_datasets(rows, per_step, step):
    batch = source(rows, prompts_per_step=per_step, seed=0, shuffle=False).batch(step)
    want = [(step * per_step + slot) % rows for slot in range(per_step)]
    assert batch.columns["n"] == want
    assert batch.group.tolist() == list(range(per_step))  # a repeated prompt is a group of its own
    assert batch.ids[:, -1].tolist() == want
