"""Rows joined without padding, and prompts that are computed once, give the usual numbers."""

from dataclasses import fields, replace

import pytest
import torch
from transformers import Gemma3Config, Gemma3Model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kedge.algorithms import ppo
from kedge.loop.stages import micro_batches
from kedge.models.backbone import VarlenAttention, run_backbone, run_packed, supports_packing
from kedge.models.packing import pack
from kedge.testing import tiny_policy
from tests.learners import SLOTS, VOCAB, experience, learner, one_rank, rollout

FAMILIES = ["llama", "gpt2", "gpt_neox", "qwen2", "qwen3", "granite"]
REPEATED = torch.tensor([0, 2, 0, 0, 2, 1, 0, 4, 4])  # of these prompts, with other responses


def grouped():
    """Nine rows of four prompts; row 1 of each rollout has an empty response."""
    one = rollout(prompt=12)
    two = rollout(9, prompt=12, seed=1)
    rows = one.prompts.rows(REPEATED)
    return replace(two, prompts=replace(rows, group=REPEATED, row=torch.arange(9)))


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_rows_have_the_states_and_gradients_of_separate_rows(family):
    backbone = tiny_policy(family, vocab_size=VOCAB).double().eval().base_model
    assert supports_packing(backbone)
    r = grouped()
    slots = torch.arange(SLOTS) <= r.response_mask.sum(1)[:, None]
    weight = torch.randn(int(slots.sum()) + len(r), backbone.config.hidden_size).double()
    results = []
    for joined in (True, False):
        packed = pack(r.prompts.ids, r.prompts.mask, r.ids, r.response_mask, joined=joined)
        with VarlenAttention([backbone]).active():
            states = run_backbone(backbone, packed.ids, packed.groups).flatten(0, 1)
            states = states[torch.cat([packed.states(slots), packed.ends])]
            (states * weight).sum().backward()
        grads = [p.grad.clone() for p in backbone.parameters() if p.grad is not None]
        results.append((states.detach(), grads))
        backbone.zero_grad()
        if joined:
            assert sum(map(sum, packed.groups)) == packed.ids.numel() < packed.lengths.sum()
            assert max(map(len, packed.groups)) > 2
    (ours, grads), (theirs, expected) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    slack = 1e-12 if family in {"gpt2", "gpt_neox"} else 1e-4  # an RMSNorm computes in float32
    torch.testing.assert_close(grads, expected, rtol=slack, atol=slack)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_joined_and_padded_rows_agree(checkpointing, shared):
    found = learner("gpt_neox", gradient_checkpointing=checkpointing)
    found.module.double()
    module, gradients = found.module, []
    assert module.parts.packs_rows
    assert found.shares_prompts
    r = grouped() if shared else rollout()
    for joined in (True, False):
        module._parts = (replace(module.parts, packs_rows=joined),)
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        grads = {}
        rows = torch.arange(len(r))
        batch = micro_batches(experience(r), rows, ppo(), 4, one_rank, by_prompt=joined)

        def keep(_, grads=grads):
            grads |= {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            return False

        found.optimizer_step(batch, ppo().loss, should_apply=keep)
        assert all(torch.equal(before[n], p) for n, p in module.named_parameters())
        gradients.append(grads)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", ["model", None])
def test_outputs_of_shared_prompts_are_those_of_separate_rows(value):
    found, r = learner("qwen2", value=value, forward_rows=3), grouped()
    wanted = {"values": value is not None, "reference": True, "full_kl": True}
    together = found.compute_logprobs(r, **wanted)
    for row in range(len(r)):
        index = torch.tensor([row])
        alone = found.compute_logprobs(r.rows(index), **wanted)
        for field in fields(alone):
            ours, theirs = getattr(together, field.name), getattr(alone, field.name)
            if theirs is not None:
                torch.testing.assert_close(ours[index], theirs, rtol=1e-6, atol=1e-6)


def test_rows_of_a_prompt_are_cut_together():
    e = experience(grouped())
    plain, by_prompt = (
        [mb.rows for mb in micro_batches(e, torch.arange(9), ppo(), 3, one_rank, by_prompt=x)]
        for x in (False, True)
    )
    lengths = [int((x.prompt_mask.sum(1) + x.response_mask.sum(1)).max()) for x in by_prompt]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(x) for x in plain] == [len(x) for x in by_prompt]

    def tokens(parts):
        packs = [
            pack(x.prompt_ids, x.prompt_mask, x.ids, x.response_mask, joined=True) for x in parts
        ]
        return sum(x.ids.numel() for x in packs)

    assert tokens(by_prompt) < tokens(plain)
    e = experience(rollout())  # of other prompts each
    plain, by_prompt = (
        [mb.rows.ids for mb in micro_batches(e, torch.arange(6), ppo(), 2, one_rank, by_prompt=x)]
        for x in (False, True)
    )
    assert all(map(torch.equal, plain, by_prompt))


def test_models_that_need_a_mask_of_all_rows_keep_padding(monkeypatch):
    windowed = tiny_policy("mistral", vocab_size=VOCAB, sliding_window=4, head_dim=8)
    assert not supports_packing(windowed.base_model)
    eager = tiny_policy("llama", vocab_size=VOCAB)
    eager.set_attn_implementation("eager")
    assert not supports_packing(eager.base_model)
    monkeypatch.setenv("KEDGE_CPU_KERNELS", "0")
    assert not supports_packing(tiny_policy("llama", vocab_size=VOCAB).base_model)


def test_nothing_is_changed_outside_of_the_context():
    model = tiny_policy("llama", vocab_size=VOCAB)
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert usual.__module__.startswith("transformers.")
    ids = torch.arange(5)[None]
    with VarlenAttention([model]).active():
        with VarlenAttention([model]).active():  # as in another thread
            assert model.config._attn_implementation != "sdpa"
        run_packed(model.base_model, ids, [(5,)])
        inside = model(input_ids=ids).logits  # another use of the model
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(inside, model(input_ids=ids).logits)
    with pytest.raises(AssertionError, match=r"call it within active"):
        run_packed(model.base_model, ids, [(5,)])


def test_a_pass_in_one_thread_survives_the_end_of_another():
    backbone = tiny_policy("llama", vocab_size=VOCAB).eval().base_model
    ids, groups = torch.arange(12)[None] % VOCAB, ((4,), (2, 3, 3))
    with torch.no_grad():
        expected = run_packed(backbone, ids, groups)
        other = VarlenAttention([backbone]).active()
        other.__enter__()

        def leave(*_):
            other.__exit__(None, None, None)

        hook = backbone.layers[0].register_forward_hook(leave)
        assert torch.equal(run_packed(backbone, ids, groups), expected)
        hook.remove()
    assert backbone.config._attn_implementation == "sdpa"


def test_windows_of_the_text_part_of_a_configuration_are_seen():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {"vocab_size": VOCAB, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=shape | text | {"sliding_window": 64},
        vision_config=shape | vision,
        mm_tokens_per_image=4,
    )
    assert not supports_packing(Gemma3Model(config).eval())
