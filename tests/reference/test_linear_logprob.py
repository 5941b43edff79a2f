"""Log-probabilities, entropy and KL against torch's own distributions, on a real model."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from transformers import AutoModelForCausalLM

from kedge.models.model import causal_parts, run_backbone
from kedge.ops.linear_logprob import TokenConstraints, linear_kl, linear_logprob


@pytest.fixture(scope="module")
def models(shared):
    model = AutoModelForCausalLM.from_pretrained(shared / "data" / "stories260k")
    other = AutoModelForCausalLM.from_pretrained(shared / "data" / "stories260k")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.05)
    return model, other


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_against_torch_distributions_in_float64(models, temperature):
    ids = torch.randint(3, 500, (4, 40), generator=torch.Generator().manual_seed(0))
    constraints, wide, parts, hidden = TokenConstraints(temperature=temperature), [], [], []
    with torch.no_grad():
        for model in models:
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            wide.append(Categorical(logits=logits.double() / temperature))
            parts.append(causal_parts(model))
            hidden.append(run_backbone(parts[-1].backbone, ids)[:, :-1].flatten(0, 1))
    targets = ids[:, 1:].flatten()
    logp, entropy = linear_logprob(hidden[0], parts[0].head(), targets, constraints=constraints)
    torch.testing.assert_close(logp.double(), wide[0].log_prob(targets), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), wide[0].entropy(), atol=2e-5, rtol=1e-5)
    kl = linear_kl(hidden[0], parts[0].head(), hidden[1], parts[1].head(), constraints=constraints)
    torch.testing.assert_close(kl.double(), kl_divergence(*wide), atol=2e-5, rtol=1e-4)
    assert kl.min() > -1e-6


def test_the_loss_equals_transformers_own(models):
    """Mean cross-entropy over next tokens, as the model computes it from labels."""
    model, _ = models
    ids = torch.randint(3, 500, (3, 30), generator=torch.Generator().manual_seed(1))
    want = model(input_ids=ids, labels=ids).loss
    parts = causal_parts(model)
    hidden = run_backbone(parts.backbone, ids)[:, :-1].flatten(0, 1)
    logp, _ = linear_logprob(hidden, parts.head(), ids[:, 1:].flatten())
    torch.testing.assert_close(-logp.mean(), want)
    mine, theirs = (torch.autograd.grad(x, list(model.parameters())) for x in (-logp.mean(), want))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
