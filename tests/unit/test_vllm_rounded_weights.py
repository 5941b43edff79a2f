"""Weights that the learner sends in the dtype of vLLM: verified without a wide copy of them."""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.learner.learner_state import WeightCopier
from kedge.models.fingerprint import fingerprint
from kedge.rollout.vllm.engine import VLLMEngine
from kedge.rollout.vllm.policy_spec import PolicySpec
from tests.contract.engines import policy, trained
from tests.unit.test_vllm_sync import Rounded


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2"])
def test_weights_that_the_learner_rounded_are_verified_as_exactly(family, monkeypatch):
    """Computed in float32, one layer at a time, as from a float32 copy of the rounded weights."""
    model = policy(family=family)
    spec = PolicySpec.of(model, dtype=torch.bfloat16)
    copied = WeightCopier(dtype=torch.bfloat16)(model.requires_grad_(True))
    widened = {name: x.float() for name, x in copied.items()}
    wide = Live(monkeypatch)
    found = spec.expected(copied)
    assert found.fingerprint == fingerprint(trained(model))
    assert torch.equal(found.logprobs, spec.logprobs(widened))
    assert torch.equal(found.rounded, spec.logprobs(widened, autocast=torch.bfloat16))
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    one_layer = sum(p.numel() for p in layers[0].parameters())
    rest = sum(x.numel() for x in copied.values()) - len(layers) * one_layer
    assert wide.most <= rest + one_layer < rest + len(layers) * one_layer
    engine = VLLMEngine(Rounded(spec, copied), spec, pad_id=0)
    assert engine.load_weights(copied, 1).fingerprint == found.fingerprint


class Live:
    """Counts the numbers in float32 copies of bfloat16 weights that exist at a time."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        to = torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: self.note(x, to(x, *a, **k)))

    def note(self, x, copied):
        is_weight = x.dim() <= 2  # queries and keys have more dimensions
        if is_weight and x.dtype == torch.bfloat16 and copied.dtype == torch.float32:
            self.now += copied.numel()
            self.most = max(self.most, self.now)
            weakref.finalize(copied, self.free, copied.numel())
        return copied

    def free(self, count):
        self.now -= count
