"""Models and optimizers of the learner: heads, adapters, loading, memory, grouping by length,
precision, fingerprints of weights.
"""

import copy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Adafactor, AutoConfig, AutoModelForSequenceClassification, modeling_utils

from kedge.algorithms import ppo
from kedge.learner.reference import AdapterReference, FrozenModel
from kedge.loop.stages import micro_batches
from kedge.models.fingerprint import checksum, fingerprint, policy_weights
from kedge.models.model import causal_parts, run_backbone
from kedge.models.peft import quantization, with_adapter
from kedge.models.value_head import ScalarHead, load_value, scalar_model
from kedge.records.errors import CheckpointError, ConfigError, DamagedCheckpointError
from kedge.testing import tiny_policy, tiny_reward_model
from tests.learners import (
    VOCAB,
    arguments,
    experience,
    learner,
    one_rank,
    random_head,
    rollout,
    take_step,
)
from tests.storages import Largest


def test_missing_models_are_named():
    bare = learner(value=None, reference=None)
    with pytest.raises(ConfigError, match="values need a value model"):
        bare.compute_logprobs(rollout(), values=True, reference=False, full_kl=False)
    with pytest.raises(ConfigError, match="reference"):
        bare.compute_logprobs(rollout(), values=False, reference=True, full_kl=False)


def test_a_model_without_a_head_is_no_policy():
    with pytest.raises(ConfigError, match="is not a causal language model"):
        causal_parts(tiny_reward_model())


def test_logits_changed_after_the_head_are_noticed():
    policy = tiny_policy()
    plain = policy.forward

    def warped(*args, **options):
        out = plain(*args, **options)
        out.logits = out.logits * 2
        return out

    policy.forward = warped
    with pytest.raises(ConfigError, match="differ from the model's own"):
        causal_parts(policy)


def test_bidirectional_models_are_no_value_models():
    config = AutoConfig.for_model(
        "distilbert", vocab_size=64, dim=32, hidden_dim=64, n_layers=1, n_heads=2, num_labels=1
    )
    with pytest.raises(ConfigError, match="must be causal"):
        load_value(AutoModelForSequenceClassification.from_config(config))


def test_states_may_depend_on_the_length_of_a_row():
    """As rounding in bfloat16 does: a trained model of 30 layers was refused for it."""

    def rounded(_module, _inputs, output):
        return output + 4 / output.shape[1]

    policy, value = tiny_policy().to(torch.bfloat16), tiny_reward_model()
    for model in (policy, value):
        model.base_model.norm.register_forward_hook(rounded)
    causal_parts(policy)
    scalar_model(value)


def test_a_value_model_has_one_label():
    config = tiny_reward_model().config
    config.num_labels = 3
    with pytest.raises(ConfigError, match="num_labels=1"):
        load_value(AutoModelForSequenceClassification.from_config(config))


def test_value_models_and_heads_come_back_from_disk(tmp_path):
    model = load_value(tiny_reward_model())
    model.save(tmp_path / "model")
    loaded = load_value(str(tmp_path / "model"))
    assert fingerprint(dict(loaded.named_parameters())) == fingerprint(
        dict(model.named_parameters())
    )
    head = random_head(8)
    head.save(tmp_path / "head")
    assert [p.name for p in (tmp_path / "head").iterdir()] == ["value_head.safetensors"]
    x = torch.randn(3, 8)
    restored = ScalarHead(8)
    restored.load_state_dict(load_file(tmp_path / "head" / "value_head.safetensors"))
    assert torch.equal(restored(x), head(x))


def test_no_tensor_holds_the_logits_of_a_batch():
    rows, vocab = 64, 20_000
    r = rollout(rows, response=40)
    policy = tiny_policy(vocab_size=vocab, hidden_size=8, layers=1, heads=2)
    found = learner(policy=policy)
    tokens = int(r.response_mask.sum())
    batch, algo = experience(r), ppo()
    with Largest() as seen:
        found.compute_logprobs(r, values=True, reference=True, full_kl=True)
        found.optimizer_step(
            micro_batches(batch, torch.arange(rows), algo, rows, one_rank), algo.loss
        )
    assert tokens * vocab > 20_000_000
    assert seen.elements <= 1 << 20  # one tile


def test_rows_padded_at_the_end_are_no_reason_to_ask_for_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append)
    model = tiny_policy("gpt2", vocab_size=16)
    model.config.pad_token_id = 7
    ids = torch.tensor([[3, 4, 7]])
    model.transformer(input_ids=ids)
    assert "attention_mask" in said.pop()
    run_backbone(causal_parts(model).backbone, ids)
    assert said == []


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, torch.optim.AdamW),
        ({"optim": "adamw_torch"}, torch.optim.AdamW),
        ({"optim": "sgd"}, torch.optim.SGD),
        ({"optim": "rmsprop"}, torch.optim.RMSprop),
        ({"optim": "adagrad"}, torch.optim.Adagrad),
        ({"optim": "adafactor"}, Adafactor),
    ],
)
def test_the_optimizer_is_the_one_named_and_its_state_is_loaded(options, kind):
    first, second = (learner(args=arguments(**options)) for _ in range(2))
    assert type(first.optimizer) is kind
    before = first.fingerprint()
    take_step(first)
    assert first.fingerprint() != before
    second.load_state_dict(first.state_dict())
    assert second.fingerprint() == first.fingerprint()
    assert take_step(second) == take_step(first)


@pytest.mark.parametrize("betas", [(0.8, 0.9), (0, 0)])
def test_adam_gets_its_betas_and_epsilon(betas):
    args = arguments(adam_beta1=betas[0], adam_beta2=betas[1], adam_epsilon=1e-5)
    group = learner(args=args).optimizer.param_groups[0]
    assert group["betas"] == betas
    assert group["eps"] == 1e-5


def test_an_optimizer_whose_package_is_missing_is_named():
    with pytest.raises(ConfigError, match="optim='adamw_torch_npu_fused' with optim_args="):
        learner(args=arguments(optim="adamw_torch_npu_fused"))


@pytest.mark.slow
def test_a_backend_that_torch_does_not_know_is_named():
    with pytest.raises(ConfigError, match="torch_compile_backend='x' with torch_compile_mode=None"):
        learner(args=arguments(torch_compile=True, torch_compile_backend="x"))


def test_an_optimizer_and_schedule_of_your_own():
    found = learner()
    mine = torch.optim.SGD(found.module.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.StepLR(mine, 1, gamma=0.5)
    found = learner(policy=found.policy, value=found.value, optimizers=(mine, schedule))
    assert take_step(found)["lr"] == 0.25
    found.advance_version()
    assert take_step(found)["lr"] == 0.125


@pytest.mark.slow
def test_compiled_backbones_give_the_same_numbers():
    args = arguments(torch_compile=True, torch_compile_backend="aot_eager")
    plain, compiled = (
        learner(
            policy=tiny_policy(vocab_size=VOCAB, layers=1),
            value=load_value(tiny_reward_model(vocab_size=VOCAB, layers=1)),
            args=each,
        )
        for each in (None, args)
    )
    inner = plain.policy.model
    assert type(compiled.module.parts.backbone) is not type(inner)
    assert type(compiled.policy.model) is type(inner)  # sampling is not compiled
    for _ in range(2):
        assert take_step(compiled) == pytest.approx(take_step(plain), rel=1e-4, abs=1e-6)
    a, b = (
        x.compute_logprobs(rollout(), values=True, reference=True, full_kl=False)
        for x in (plain, compiled)
    )
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(a.values, b.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"optim": "adamw_torch"}])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x[:1].clone(), r"torch.float32 \(1,"),
        (lambda x: x.double(), "torch.float64"),
        (lambda x: 3.0, "3.0"),
        (None, "None"),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused(options, change, said):
    """Fused AdamW (the default) would write past the end of the weight."""
    first, second = (learner(args=arguments(**options)) for _ in range(2))
    take_step(first)
    state = first.state_dict()
    index, one = next(
        (i, x) for i, x in state["optimizer"]["state"].items() if first_matrix(x) is not None
    )
    name = first_matrix(one)
    if change is None:
        del one[name]
    else:
        one[name] = change(one[name])
    with pytest.raises(
        DamagedCheckpointError, match=rf"state/{index}/{name} must be .*, got {said}.*of the weight"
    ):
        second.load_state_dict(state)


def first_matrix(state):
    return next((n for n, x in state.items() if torch.is_tensor(x) and x.dim() == 2), None)


def test_an_optimizer_of_other_weights_is_refused():
    first, second = learner(), learner()
    take_step(first)
    state = first.state_dict()
    state["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(CheckpointError, match="train the same weights"):
        second.load_state_dict(state)


def test_scaled_losses_give_the_same_step_and_the_scale_falls_until_it_fits():
    plain, scaled = learner(max_grad_norm=0.5), learner(max_grad_norm=0.5)
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert take_step(scaled) == pytest.approx(take_step(plain), rel=1e-4, abs=1e-6)
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before, skipped = scaled.fingerprint(), 0
    batch = experience(rollout())
    large = replace(batch, returns=batch.returns * 1e4)
    while scaled.fingerprint() == before:
        skipped = take_step(scaled, large)["skipped_steps"]
    assert skipped > 3
    assert scaled.scaler.get_scale() == 2.0 ** (127 - skipped)


def weights(dtype=torch.float32, n=300_000):
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(n, generator=generator).to(dtype),
        "b": torch.randn(3, 5, generator=generator).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("index", [0, 16_383, 262_143, 262_144, 299_999])
def test_the_smallest_change_of_any_weight_shows(dtype, index):
    before = weights(dtype)
    after = weights(dtype)
    bits = after["a"].view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[index] += 1
    assert fingerprint(before) == fingerprint(weights(dtype))
    assert fingerprint(before) != fingerprint(after)


def test_order_of_names_does_not_matter():
    w = weights()
    assert fingerprint(w) == fingerprint(reversed(w.items()))


def test_names_shapes_and_types_do():
    w = weights()
    a, b = w.values()
    other = [
        {"a": a, "c": b},
        {"a": a},
        {"a": a, "b": b.view(5, 3)},
        {"a": a, "b": b.view(torch.int32)},
        {"a": a.view(500, 600).t().reshape(-1), "b": b},
    ]
    assert len({fingerprint(x) for x in [w, *other]}) == 1 + len(other)


def test_layout_in_memory_does_not_matter():
    w = weights()["a"].view(500, 600)
    assert fingerprint({"w": w}) == fingerprint({"w": w.t().contiguous().t()})


def test_empty_scalar_and_boolean_tensors():
    odd = {"e": torch.zeros(0), "s": torch.tensor(1.0), "m": torch.tensor([True, False])}
    flipped = odd | {"m": torch.tensor([False, False])}
    assert fingerprint(odd) != fingerprint(flipped)
    assert fingerprint({}) == fingerprint({})


def test_policy_weights_are_those_that_train():
    model = tiny_policy("gpt2")
    assert set(policy_weights(model)) == {name for name, _ in model.named_parameters()}
    model.requires_grad_(False)
    model.transformer.ln_f.weight.requires_grad_(True)
    assert set(policy_weights(model)) == {"transformer.ln_f.weight"}


@pytest.mark.parametrize("rows", [0, 1, 3, 700, 23_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_checksums_of_shards_add_up_to_that_of_the_whole(rows, ranks):
    whole = torch.randn(rows, 51, generator=torch.Generator().manual_seed(rows))
    chunk = max(-(-rows // ranks), 1)
    parts = [checksum(x, i * chunk * 51) for i, x in enumerate(whole.split(chunk))]
    assert int(sum(parts)) % 2**32 == int(checksum(whole)) % 2**32


def test_exchanged_chunks_rows_and_words_show():
    whole = torch.randn(5_000, 256, generator=torch.Generator().manual_seed(0))
    orders = [[1, 0, 2, 3, 4], [0, 3, 2, 1, 4]]
    others = [whole.view(5, 1000, 256)[order].view_as(whole) for order in orders]
    chunks = whole.view(-1)[: 4 * 2**18].view(4, -1)  # of the checksum
    others.append(torch.cat([chunks[[1, 0, 2, 3]].flatten(), whole.view(-1)[4 * 2**18 :]]))
    others += [whole[[0, 2, 1, *range(3, 5_000)]], whole[:, [1, 0, *range(2, 256)]]]
    sums = {int(checksum(x)) for x in [whole, *others]}
    assert len(sums) == 1 + len(others)


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
