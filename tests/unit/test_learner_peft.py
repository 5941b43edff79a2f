"""Policies that train an adapter: what trains, and what the reference is."""

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from kedge.errors import ConfigError
from kedge.learner.reference import AdapterReference, FrozenModel
from kedge.models.model import causal_parts
from kedge.models.peft import quantization, with_adapter
from kedge.testing import tiny_policy
from tests.learners import VOCAB, learner, rollout, take_step


def lora(targets=("q_proj", "v_proj"), **options):
    return LoraConfig(
        r=4, target_modules=list(targets), task_type="CAUSAL_LM", lora_dropout=0.3, **options
    )


HEADS = {
    "attention": lora(),
    "lora on the head": lora(("q_proj", "lm_head")),
    "a copy of the head": lora(modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_only_the_adapter_trains_and_the_reference_is_the_base(name):
    policy = tiny_policy(vocab_size=VOCAB)
    base = copy.deepcopy(policy)
    policy = with_adapter(policy, HEADS[name])
    found = learner(policy=policy, reference=AdapterReference(policy))
    r = rollout()
    for _ in range(3):
        assert take_step(found)["grad_norm/policy"] > 0
    note = found.compute_logprobs(r, values=False, reference=True, full_kl=True)
    found.reference = FrozenModel(base)
    want = found.compute_logprobs(r, values=False, reference=True, full_kl=True)
    torch.testing.assert_close(note.ref_logprobs, want.ref_logprobs)
    torch.testing.assert_close(note.full_kl, want.full_kl, atol=1e-6, rtol=1e-4)
    assert not torch.allclose(note.logprobs, note.ref_logprobs)
    # what the learner says is what the model says
    row = 0
    ids = torch.cat([r.prompts.ids[row][r.prompts.mask[row]], r.ids[row][r.response_mask[row]]])
    with torch.no_grad():
        logp = policy(input_ids=ids[None]).logits[0].log_softmax(-1)
    n = int(r.response_mask[row].sum())
    want = logp[-n - 1 : -1].gather(1, ids[-n:, None])[:, 0]
    torch.testing.assert_close(note.logprobs[row, :n], want, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_gradient_of_an_adapter_on_the_head_is_the_models_own():
    policy = with_adapter(tiny_policy(vocab_size=VOCAB), HEADS["lora on the head"])
    head = policy.get_base_model().lm_head
    with torch.no_grad():
        head.lora_B["default"].weight.normal_()
    found = learner(policy=policy, reference=None)
    x = torch.arange(8)[None]
    weights = [head.lora_A["default"].weight, head.lora_B["default"].weight]
    want = torch.autograd.grad(policy(input_ids=x).logits.square().sum(), weights)
    h = found.module.parts
    z = h.backbone(input_ids=x).last_hidden_state @ h.head().weight.T
    got = torch.autograd.grad(z.square().sum(), weights)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_reference_adapter_is_put_back_even_after_an_error():
    policy = get_peft_model(tiny_policy(vocab_size=VOCAB), lora(), adapter_name="ppo")
    policy.add_adapter("sft", lora(init_lora_weights=False))
    policy = with_adapter(policy, adapter="ppo")
    flags = [p.requires_grad for p in policy.parameters()]
    for name in ("sft", None):
        reference = AdapterReference(policy, name)

        def fail(reference=reference):
            with reference.active():
                raise RuntimeError("on the way")

        with pytest.raises(RuntimeError, match="on the way"):
            fail()
        assert policy.active_adapter == "ppo"
        assert [p.requires_grad for p in policy.parameters()] == flags
        layer = policy.get_base_model().model.layers[0].self_attn.q_proj
        assert not layer.disable_adapters
    found = learner(policy=policy, reference=AdapterReference(policy, "sft"))
    note = found.compute_logprobs(rollout(), values=False, reference=True, full_kl=False)
    assert not torch.allclose(note.logprobs, note.ref_logprobs)
    before = {n: p.clone() for n, p in policy.named_parameters() if ".sft." in n}
    take_step(found)
    assert before
    assert all(torch.equal(p, policy.get_parameter(n)) for n, p in before.items())


def test_adapters_of_half_precision_bases_are_float32():
    policy = with_adapter(tiny_policy(vocab_size=VOCAB).to(torch.bfloat16), lora())
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    learner(policy=policy)


def test_refusals_name_the_way_out():
    plain = tiny_policy(vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="pass peft_config"):
        with_adapter(plain, adapter="x")
    policy = with_adapter(plain, lora())
    with pytest.raises(ConfigError, match="merge_and_unload"):
        with_adapter(policy, lora())
    with pytest.raises(ConfigError, match="adapters are default"):
        with_adapter(policy, adapter="other")
    soft = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="virtual tokens"):
        with_adapter(tiny_policy(vocab_size=VOCAB), soft)


def test_dora_on_the_head_is_refused():
    policy = with_adapter(tiny_policy(vocab_size=VOCAB), lora(("lm_head",), use_dora=True))
    with pytest.raises(ConfigError, match="must be plain LoRA"):
        causal_parts(policy)


def test_quantization_names_its_package(monkeypatch):
    monkeypatch.setattr("kedge.models.peft.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        quantization(4)
