"""Rows joined without padding give the numbers of padded rows."""

from dataclasses import replace

import pytest
import torch

from kedge.algorithms import ppo
from kedge.backends.hf.joined_rows import join_rows, joins_rows, run_joined
from kedge.engine.stages import cut
from kedge.testing import tiny_policy
from tests.learners import VOCAB, experience, learner, one_rank, rollout


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2", "qwen3", "granite"])
def test_joined_rows_have_the_states_of_separate_rows(family):
    backbone = tiny_policy(family, vocab_size=VOCAB).double().eval().base_model
    ids, lengths = torch.randint(VOCAB, (3, 11)), torch.tensor([4, 11, 1])
    assert joins_rows(backbone)
    with torch.no_grad():
        joined = run_joined(backbone, join_rows(ids, lengths), lengths.tolist())[0]
        for row, states in enumerate(joined.split(lengths.tolist())):
            alone = backbone(input_ids=ids[row : row + 1, : lengths[row]]).last_hidden_state[0]
            torch.testing.assert_close(states, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_joined_and_padded_rows_agree(checkpointing):
    found = learner("gpt_neox", gradient_checkpointing=checkpointing)
    found.module.double()
    module, gradients = found.module, []
    assert module.parts.joins_rows
    for joined in (True, False):
        module._parts = (replace(module.parts, joins_rows=joined),)
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        grads = {}
        batch = cut(experience(rollout()), torch.arange(6), ppo(), 6, one_rank)

        def keep(_, grads=grads):
            grads |= {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            return False

        found.optimizer_step(batch, ppo().loss, should_apply=keep)
        assert all(torch.equal(before[n], p) for n, p in module.named_parameters())
        gradients.append(grads)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_models_that_need_a_mask_of_all_rows_keep_padding(monkeypatch):
    windowed = tiny_policy("mistral", vocab_size=VOCAB, sliding_window=4, head_dim=8)
    assert not joins_rows(windowed.base_model)
    eager = tiny_policy("llama", vocab_size=VOCAB)
    eager.set_attn_implementation("eager")
    assert not joins_rows(eager.base_model)
    monkeypatch.setenv("KEDGE_CPU_KERNELS", "0")
    assert not joins_rows(tiny_policy("llama", vocab_size=VOCAB).base_model)
