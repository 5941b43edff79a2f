"""The N+ implementation details of sampling (rows 26 and 49 of the checklist).

Source: Huang et al., "The N+ Implementation Details of RLHF with PPO" (arXiv 2403.17031), and its
code.
"""

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


def padded(texts):
    """Prompts left-padded to the longest text."""
    width = max(map(len, texts))
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


def test_row_26_fixed_length_sampling(model, texts):
    """Without stop ids every response has the full length; by default it ends at EOS."""
    assert PPOConfig.stop_token == "eos"
    rollout = sample(model, padded(texts))
    assert rollout.ids.shape == (len(texts), LENGTH)
    assert rollout.response_mask.all()
    assert not rollout.terminated.any()
    # min_new_tokens = max_new_tokens fixes the length, too, and keeps the stop token out.
    banned = sample(model, padded(texts), stop_ids=(EOS,), min_new_tokens=LENGTH)
    assert banned.response_mask.all()
    assert (banned.ids != EOS).all()


def test_row_49_a_low_temperature_is_nearly_greedy(model, texts):
    cold = sample(model, padded(texts), temperature=0.01)
    greedy = sample(model, padded(texts), temperature=0.0)
    first_sure = [
        bool((logits_after(model, t, r)[0].topk(2).values.diff().abs() > 0.2).item())
        for t, r in zip(texts, greedy.ids, strict=True)
    ]
    assert any(first_sure)
    sure = torch.tensor(first_sure)
    assert torch.equal(cold.ids[sure, 0], greedy.ids[sure, 0])
