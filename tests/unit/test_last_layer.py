"""The last layer's feed-forward part runs only where its output is read, with the same results."""

from dataclasses import replace

import pytest
import torch

from kedge.algorithms import ppo
from kedge.backends.hf.freezing import find_layers, train_top_layers
from kedge.backends.hf.last_layer import LastLayers
from kedge.backends.hf.model import causal_parts, get_backbone
from kedge.engine.micro_batches import cut
from kedge.testing import tiny_policy
from tests.learners import VOCAB, experience, learner, one_rank, rollout


def step(*, everything, joined=True, top=0, **options):
    """The gradients of a step, its log-probabilities, and the tokens of the last two layers."""
    policy = tiny_policy("gpt_neox", vocab_size=VOCAB).double()
    if top:
        train_top_layers(get_backbone(policy), top, what="the policy")
    found = learner(policy=policy, value="model", **options)
    found.module.double()
    found.reference.model.double()
    if everything:
        found._plan.last_layers = LastLayers([])
    if not joined:
        found.module._parts = (replace(found.module.parts, joins_rows=False),)
    sizes = [[], []]
    for layer, tokens in zip(find_layers(get_backbone(policy))[1][-2:], sizes, strict=True):
        layer.mlp.dense_h_to_4h.register_forward_hook(
            lambda _, inputs, __, tokens=tokens: tokens.append(inputs[0][..., 0].numel())
        )
    r, grads = rollout(prompt=20), {}
    outputs = found.compute_logprobs(r, values=True, reference=True, full_kl=True)

    def keep(_):
        named = found.module.named_parameters()
        grads.update({n: p.grad.clone() for n, p in named if p.grad is not None})
        return False

    found.optimizer_step(cut(experience(r), torch.arange(6), ppo(), 4, one_rank), ppo().loss,
                         should_apply=keep)  # fmt: skip
    numbers = [outputs.logprobs, outputs.ref_logprobs, outputs.values, outputs.full_kl]
    return grads, numbers, sizes


@pytest.mark.parametrize(
    "options",
    [{}, {"joined": False}, {"gradient_checkpointing": True}, {"top": 1}],
    ids=["joined", "padded", "checkpointing", "kept states"],
)
def test_results_are_those_of_all_tokens(options):
    some, all_tokens = (step(everything=x, **options) for x in (False, True))
    torch.testing.assert_close(some[0], all_tokens[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(some[1], all_tokens[1], rtol=1e-6, atol=1e-6)
    before, last = some[2]
    assert sum(last) < sum(all_tokens[2][1])
    assert before == all_tokens[2][0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2", "granite"])
def test_families(family):
    assert LastLayers([causal_parts(tiny_policy(family, vocab_size=VOCAB).eval())])._parts


def test_a_part_that_mixes_tokens_is_left_out():
    policy = tiny_policy("llama", vocab_size=VOCAB)
    mlp = find_layers(get_backbone(policy))[1][-1].mlp
    mlp.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    assert not LastLayers([causal_parts(policy, verify=False)])._parts
