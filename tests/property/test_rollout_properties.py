"""Responses depend on prompt, row and seed alone; batches of prompts on their step alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.data import DatasetPrompts
from kedge.records.types import PromptBatch, Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.rollout.embedded.sampling import allowed_tokens, restrict, sample_tokens, uniforms
from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer

NO_STOP = torch.tensor([], dtype=torch.int64)


@st.composite
def logits_and_u(draw_):
    rows = draw_(st.integers(1, 4))
    vocabulary = draw_(st.sampled_from([1, 2, 7, 255, 256, 1024, 1025, 1281, 3000]))
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 2**32)))
    logits = torch.randn(rows, vocabulary, generator=generator) * draw_(st.floats(0, 40))
    if draw_(st.booleans()):
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -math.inf
        logits[:, draw_(st.integers(0, vocabulary - 1))] = 0.0
    u = draw_(
        st.lists(st.integers(0, 2**52 - 1).map(lambda k: k / 2**52), min_size=rows, max_size=rows)
    )
    return logits, torch.tensor(u, dtype=torch.float64)


@given(logits_and_u())
@settings(max_examples=200, deadline=None)
def test_a_drawn_token_is_possible_and_lies_at_its_quantile(case):
    logits, u = case
    token, logprob = sample_tokens(logits, u)
    exact = logits.double().softmax(-1)
    p = exact.gather(-1, token[:, None])[:, 0]
    assert (p > 0).all()
    normal = p > 1e-37  # float32 has fewer digits below
    assert torch.allclose(logprob.double()[normal], p.log()[normal], atol=1e-5, rtol=1e-6)
    assert torch.isfinite(logprob).all()
    upper = exact.cumsum(-1).gather(-1, token[:, None])[:, 0]
    assert (upper >= u - 2e-7).all()
    assert (upper - p <= u + 2e-7).all()


@given(logits_and_u(), st.integers(0, 9), st.floats(0.01, 1), st.floats(0, 1), st.floats(0.05, 5))
@settings(max_examples=100, deadline=None)
def test_truncation_keeps_the_best_and_never_everything_out(case, top_k, top_p, min_p, temperature):
    logits, u = case
    sampling = Sampling(
        max_new_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature
    )
    cut = restrict(logits, sampling, 0, NO_STOP)
    assert (cut.amax(-1) > -math.inf).all()
    assert torch.allclose(cut.amax(-1), logits.amax(-1) / temperature)
    if top_k:
        assert (cut > -math.inf).sum(-1).max() <= top_k
    scaled = logits / temperature  # denormal logits may become equal
    dropped = torch.where(cut == -math.inf, scaled, -math.inf).amax(-1)
    kept = torch.where(cut > -math.inf, scaled, math.inf).amin(-1)
    assert (dropped <= kept).all()
    token = sample_tokens(cut, u)[0]
    assert (allowed_tokens(cut)[0] == token[:, None]).any(-1).all()


@given(st.integers(-(2**70), 2**70), st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
@settings(deadline=None)
def test_uniforms_belong_to_their_row(seed, rows):
    index = torch.tensor(rows)
    table = uniforms(seed, index, torch.arange(5))
    for row, numbers in zip(rows, table, strict=True):
        assert torch.equal(uniforms(seed, torch.tensor([row]), torch.arange(5))[0], numbers)
    assert ((table >= 0) & (table < 1)).all()


@pytest.fixture(scope="module")
def model():
    return tiny_policy("gpt2", initializer_range=0.3, vocab_size=32)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_response_depends_on_prompt_row_and_seed_alone(model, data):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5), label="lengths")
    which = data.draw(
        st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=9), label="prompt of rows"
    )
    chunk_rows = data.draw(st.integers(1, 9), label="chunk_rows")
    extra = data.draw(st.integers(0, 3), label="extra padding")
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 32, (n,), generator=generator) for n in lengths]
    sampling = Sampling(max_new_tokens=8, stop_ids=(1, 2, 3, 4))
    width = max(lengths) + extra

    def batch(rows):
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, r in enumerate(rows):
            text = texts[which[r]]
            ids[i, width - len(text) :], mask[i, width - len(text) :] = text, True
        group = torch.tensor([which[r] for r in rows])
        return PromptBatch(ids=ids, mask=mask, group=group, row=torch.tensor(rows))

    engine = EmbeddedEngine(model, pad_id=1, chunk_rows=chunk_rows)
    together = engine.generate(batch(range(len(which))), sampling=sampling, seed=9)
    for r in range(len(which)):
        alone = engine.generate(batch([r]), sampling=sampling, seed=9)
        n = int(alone.response_mask.sum())
        assert together.response_mask[r].sum() == n
        assert torch.equal(together.ids[r, :n], alone.ids[0])
        assert together.terminated[r] == alone.terminated[0]


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
