import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.rollout.embedded.sampling import allowed_tokens, restrict, sample_tokens, uniforms
from kedge.testing import tiny_policy
from kedge.types import PromptBatch, Sampling

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
