"""The N+ implementation details of sampling (rows 25 to 29 of the checklist).

Source: Huang et al., "The N+ Implementation Details of RLHF with PPO" (arXiv 2403.17031), and its
code.
"""

import math
from dataclasses import replace

import pytest
import torch

from kedge import PPOConfig
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy
from kedge.types import PromptBatch, Sampling

PAD, EOS, VOCAB, LENGTH = 63, 5, 64, 16


@pytest.fixture(scope="module", params=["gpt2", "llama"])  # absolute and rotary positions
def model(request):
    return tiny_policy(request.param, vocab_size=VOCAB, initializer_range=0.3).eval()


def padded(texts, left):
    """Prompts left-padded to the longest text plus ``left``."""
    width = max(map(len, texts)) + left
    ids = torch.full((len(texts), width), PAD)
    mask = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :], mask[row, width - len(text) :] = text, True
    index = torch.arange(len(texts))
    return PromptBatch(ids=ids, mask=mask, group=index, row=index)


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(6, 60, (n,), generator=generator) for n in (2, 9, 5, 1, 9, 3, 7, 4)]


def sample(model, prompts, **options):
    engine = EmbeddedEngine(model, pad_id=PAD)
    sampling = Sampling(**{"max_new_tokens": LENGTH, "temperature": 0.7, **options})
    return engine.generate(prompts, sampling=sampling, seed=3)


def logits_after(model, text, response):
    """Logits [R, V] that the response tokens were drawn from; no padding, no cache."""
    ids = torch.cat([text, response])[None]
    return model(input_ids=ids).logits[0, len(text) - 1 : -1].detach()


def test_row_25_positions_count_real_tokens(model, texts):
    near, far = sample(model, padded(texts, 0)), sample(model, padded(texts, 20))
    assert torch.equal(near.ids, far.ids)
    assert torch.allclose(near.behavior_logprobs, far.behavior_logprobs, atol=2e-6)
    for row, text in enumerate(texts):
        logits = logits_after(model, text, near.ids[row]) / 0.7
        want = logits.log_softmax(-1).gather(-1, near.ids[row][:, None])[:, 0]
        assert (near.behavior_logprobs[row] - want).abs().max() < 1e-5


def test_row_26_fixed_length_sampling(model, texts):
    """Without stop ids every response has the full length; by default it ends at EOS."""
    assert PPOConfig.stop_token == "eos"
    rollout = sample(model, padded(texts, 0))
    assert rollout.ids.shape == (len(texts), LENGTH)
    assert rollout.response_mask.all()
    assert not rollout.terminated.any()
    # min_new_tokens = max_new_tokens fixes the length, too, and keeps the stop token out.
    banned = sample(model, padded(texts, 0), stop_ids=(EOS,), min_new_tokens=LENGTH)
    assert banned.response_mask.all()
    assert (banned.ids != EOS).all()


def test_row_27_temperature_divides_the_logits(model, texts):
    """The reference adds 1e-7 to the temperature; the difference is far below float32's."""
    for temperature in (0.3, 0.7, 1.5):
        rollout = sample(model, padded(texts, 0), temperature=temperature)
        for row, text in enumerate(texts):
            logits = logits_after(model, text, rollout.ids[row])
            want = (logits / (temperature + 1e-7)).log_softmax(-1)
            got = rollout.behavior_logprobs[row]
            assert (got - want.gather(-1, rollout.ids[row][:, None])[:, 0]).abs().max() < 2e-5
            unscaled = logits.log_softmax(-1).gather(-1, rollout.ids[row][:, None])[:, 0]
            assert (got - unscaled).abs().max() > 0.01


def test_row_28_old_logprobs_come_from_sampling_itself(model, texts):
    """One forward pass reads the prompts, then one per further token: none for the scores."""
    calls = []
    hook = model.register_forward_hook(lambda *call: calls.append(call[-1].logits.shape))
    try:
        rollout = sample(model, padded(texts, 0))
    finally:
        hook.remove()
    assert len(calls) == LENGTH
    assert set(calls) == {(len(texts), 1, VOCAB)}
    assert torch.isfinite(rollout.behavior_logprobs).all()


def test_row_29_nothing_follows_the_first_stop_token(model, texts):
    """Stopping early equals sampling the full length and cutting after the first stop token."""
    full = sample(model, padded(texts * 4, 0))
    cut = sample(model, padded(texts * 4, 0), stop_ids=(EOS, 7, 8))
    stops = torch.isin(full.ids, torch.tensor([EOS, 7, 8]))
    kept = stops.long().cumsum(1) - stops.long() == 0  # up to and with the first
    size = cut.ids.shape[1]
    assert not kept[:, size:].any()
    assert torch.equal(cut.response_mask, kept[:, :size])
    assert torch.equal(cut.ids, full.ids.masked_fill(~kept, PAD)[:, :size])
    assert torch.equal(cut.terminated, stops.any(1))
    assert cut.terminated.any()
    assert not cut.terminated.all()


def test_row_49_a_low_temperature_is_nearly_greedy(model, texts):
    cold = sample(model, padded(texts, 0), temperature=0.01)
    greedy = sample(model, padded(texts, 0), temperature=0.0)
    first_sure = [
        bool((logits_after(model, t, r)[0].topk(2).values.diff().abs() > 0.2).item())
        for t, r in zip(texts, greedy.ids, strict=True)
    ]
    assert any(first_sure)
    sure = torch.tensor(first_sure)
    assert torch.equal(cold.ids[sure, 0], greedy.ids[sure, 0])


def test_stop_token_at_the_same_rate_as_its_probability(model):
    """Row 26 with 29: no bias from stopping; the first token is EOS as often as it should be."""
    rows = 4000
    index = torch.arange(rows)
    one = padded([torch.tensor([9, 11, 13])], 0)
    batch = replace(
        one,
        ids=one.ids.expand(rows, -1),
        mask=one.mask.expand(rows, -1),
        group=torch.zeros_like(index),
        row=index,
    )
    probs = (model(input_ids=one.ids).logits[0, -1].detach() / 0.7).softmax(-1)
    stop = int(probs.argsort()[-4])
    rollout = EmbeddedEngine(model, pad_id=PAD, chunk_rows=rows).generate(
        batch, sampling=Sampling(max_new_tokens=1, temperature=0.7, stop_ids=(stop,)), seed=0
    )
    p = float(probs[stop])
    seen = float(rollout.terminated.float().mean())
    assert abs(seen - p) < 4.5 * math.sqrt(p * (1 - p) / rows)
