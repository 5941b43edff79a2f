"""States below the trained layers, computed once per batch; ``train_layers``; rows joined without
padding and prompts that are computed once: the usual numbers.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3Config,
    Gemma3Model,
)

from kedge.algorithms import ppo
from kedge.cli.arguments import parse
from kedge.ext.plan.command import plan
from kedge.learner.learner import HFLearner
from kedge.learner.reference import AdapterReference, frozen_copy
from kedge.learner.settings import LearnerSettings
from kedge.loop.stages import EpochPlan, micro_batches, optimize
from kedge.models import backbone as module
from kedge.models.backbone import run_backbone, run_packed, supports_packing
from kedge.models.freezing import find_layers, share_frozen_weights, train_top_layers
from kedge.models.model import causal_parts, get_backbone
from kedge.models.packing import pack
from kedge.models.peft import with_adapter
from kedge.models.shared_base import value_adapter
from kedge.models.value_head import build_value_head, load_value
from kedge.ops.attention import use_own_attention
from kedge.records.errors import CheckpointError, ConfigError
from kedge.testing import tiny_policy, tiny_reward_model
from tests.e2e.small import VOCAB as WORDS
from tests.e2e.small import rows, small
from tests.learners import SLOTS, VOCAB, arguments, experience, learner, one_rank, rollout

LAYERS = 4
HEADS = ("lm_head.", "embed_out.")  # the latter in early releases of transformers 5
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SMALL_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "gpt_neox": {},
    "gpt2": {"n_positions": 64},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"use_sliding_window": True, **SMALL_WINDOW},
    "gemma2": SMALL_WINDOW,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_head": 4},
}


def build(family="llama", *, head="causal", seed=0, dtype=torch.float32):
    kind = AutoModelForCausalLM if head == "causal" else AutoModelForSequenceClassification
    shape = {**SHAPE, **FAMILIES[family], **({} if head == "causal" else {"num_labels": 1})}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **shape)
        model = kind.from_config(config)
        for p in model.parameters():  # biases and norms that matter
            nn.init.normal_(p, std=0.2)
    return model.to(dtype)


def freeze(model, count=1):
    train_top_layers(get_backbone(model), count, what="the policy")
    return model


def build_learner(policy, *, value="head", reference=True, cache=True, **options):
    reference = frozen_copy(policy) if reference is True else reference
    value = build_value_head(causal_parts(policy)) if value == "head" else value
    return HFLearner(
        policy,
        arguments(optim="sgd", learning_rate=0.05),
        LearnerSettings(
            **{"total_iterations": 10, "cache_trunk": cache, "forward_rows": 2, **options}
        ),
        value=value,
        reference=reference,
        accelerator=Accelerator(cpu=True),
    )


class Passes:
    """Counts how many tokens each layer of a model reads."""

    def __init__(self, model):
        self.tokens = Counter()
        _, layers = find_layers(get_backbone(model) or model)
        for number, layer in enumerate(layers):
            first = next(m for m in layer.modules() if not list(m.children()))
            first.register_forward_hook(
                lambda _, inputs, __, number=number: self.tokens.update(
                    {number: inputs[0].shape[:2].numel()}
                )
            )


def real_tokens(r):
    return int(r.prompts.mask.sum() + r.response_mask.sum())


def update(learner, *, epochs=2, max_tokens=None):
    """Annotation and epochs of two optimizer steps; everything that they compute."""
    r = rollout()
    outputs = learner.compute_logprobs(r, values=True, reference=True, full_kl=True)
    batch = experience(r)
    plan = EpochPlan(epochs=epochs, minibatches=2, micro_rows=2, max_tokens=max_tokens, seed=3)
    metrics = optimize(batch, learner, ppo(), plan)
    weights = {n: p.detach().clone() for n, p in learner.module.named_parameters()}
    learner.advance_version()
    fields = ("logprobs", "entropy", "ref_logprobs", "full_kl", "values", "last_values")
    found = {n: getattr(outputs, n) for n in fields if getattr(outputs, n) is not None}
    return found, metrics, weights


def assert_same(one, other, tolerance):
    for a, b in zip(one, other, strict=True):
        for name in a:
            torch.testing.assert_close(
                *(torch.as_tensor(x[name]) for x in (a, b)),
                atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_states_change_no_number(family):
    results = []
    for cache in (True, False):
        policy = freeze(build(family))
        value = load_value(freeze(build(family, head="score", seed=1), 2))
        learner = build_learner(policy, value=value, cache=cache)
        assert len(learner._backbones._cached) == (3 if cache else 0)
        before = copy.deepcopy(dict(policy.named_parameters()))
        results.append(update(learner))
        moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
        assert moved
        assert moved <= {n for n, p in policy.named_parameters() if p.requires_grad}
    assert_same(*results, 1e-6)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gpt2"])
def test_kept_states_are_exact_in_float64_also_of_joined_rows_with_shared_prompts(family, joined):
    model = freeze(build(family, dtype=torch.float64), 2).eval()
    backbone = get_backbone(model)
    cache = module.BackboneCache([causal_parts(model)])
    assert cache._cached
    r = rollout(rows=4, prompt=12)
    prompts = [x[[0, 0, 2, 0]] for x in (r.prompts.ids, r.prompts.mask)]  # 0, 1 and 3 are equal
    packed = pack(*prompts, r.ids, r.response_mask, joined=joined)
    assert not joined or len(packed.groups[0]) > 2
    top = [p for p in backbone.parameters() if p.requires_grad]
    real = torch.cat(packed.row_tokens()).unique()
    weight = torch.randn(len(real), SHAPE["hidden_size"], dtype=torch.float64)

    def outputs(hidden):
        states = hidden.flatten(0, 1)[real]
        return [states, *torch.autograd.grad((states * weight).sum(), top)]

    use_own_attention(model)
    expected = outputs(module.run_backbone(backbone, packed.ids, packed.groups))
    for kept in ([], [1], [0, 2], [0, 1, 2, 3]):  # rows of an earlier batch
        cache.clear()
        with cache.active():
            if kept:
                earlier = [x[kept] for x in (*prompts, r.ids, r.response_mask)]
                module.read_backbone(backbone, pack(*earlier, joined=joined))
            found = outputs(module.read_backbone(backbone, packed))
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


def test_frozen_layers_read_each_token_once():
    policy, value = freeze(build()), load_value(freeze(build(head="score", seed=1), 2))
    learner = build_learner(policy, value=value)
    reads = [Passes(m) for m in (policy, value.model, learner.reference.model)]
    update(learner, epochs=3)
    once = real_tokens(rollout())
    often = 4 * once  # annotation and three epochs
    assert [reads[0].tokens[i] for i in range(LAYERS)] == [once, once, once, often]
    assert [reads[1].tokens[i] for i in range(LAYERS)] == [once, once, often, often]
    assert [reads[2].tokens[i] for i in range(LAYERS)] == [0, 0, 0, once]
    update(learner, epochs=1)  # the next iteration has other rows
    assert reads[0].tokens[0] == 2 * once


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("value", ["head", "adapter"])
def test_adapters_on_the_top_layers(value, checkpointing):
    results = []
    for cache in (True, False):
        config = LoraConfig(
            r=4,
            target_modules=["q_proj", "up_proj"],
            layers_to_transform=[3],
            task_type="CAUSAL_LM",
        )
        policy = with_adapter(build(), config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            made = value_adapter(policy) if value == "adapter" else None
            for p in policy.parameters():
                if p.requires_grad:
                    nn.init.normal_(p, std=0.2)
        made = made or build_value_head(causal_parts(policy))
        learner = build_learner(
            policy,
            value=made,
            reference=AdapterReference(policy),
            cache=cache,
            gradient_checkpointing=checkpointing,
        )
        reads = Passes(policy.get_base_model())
        results.append(update(learner))
        assert (reads.tokens[0] == real_tokens(rollout())) == cache
    assert_same(*results, 1e-6)


def test_an_adapter_on_a_low_layer_or_a_trained_embedding_keeps_nothing():
    policy = with_adapter(build(), LoraConfig(r=4, target_modules=["q_proj"]))
    learner = build_learner(policy, reference=AdapterReference(policy))
    assert not learner._backbones._cached
    policy = freeze(build())
    policy.model.embed_tokens.weight.requires_grad_(True)
    assert not build_learner(policy)._backbones._cached


def test_rows_beyond_the_memory_are_computed_again(monkeypatch, caplog):
    row = 8 * SHAPE["hidden_size"] * 4  # bytes
    monkeypatch.setattr(module, "_budget", lambda device: 2.5 * row)
    policy = freeze(build())
    learner, reads = build_learner(policy), Passes(policy)
    limited = update(learner)
    once = real_tokens(rollout())
    assert once < reads.tokens[0] < 4 * once  # of two models and two epochs
    assert caplog.text.count("recomputed when needed") == 1
    assert_same(limited, update(build_learner(freeze(build()), cache=False)), 1e-6)


def test_a_model_whose_upper_layers_read_lower_ones_is_left_out(caplog):
    policy = freeze(build())
    _, layers = find_layers(get_backbone(policy))
    seen = {}
    layers[0].self_attn.register_forward_hook(lambda _, __, out: seen.update(skip=out[0]))
    layers[3].register_forward_hook(lambda _, __, out: out + seen["skip"])
    learner = build_learner(policy)
    assert not learner._backbones._cached
    assert "cannot be cached: its upper layers read more" in caplog.text


def test_layers_that_are_unfrozen_later_are_computed_again():
    policy = freeze(build())
    learner, reads = build_learner(policy), Passes(policy)
    policy.requires_grad_(True)
    update(learner)
    assert reads.tokens[0] == 3 * real_tokens(rollout())


def test_what_trains():
    policy = freeze(build("gpt_neox"), 2)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    prefixes = ("gpt_neox.layers.2.", "gpt_neox.layers.3.", "gpt_neox.final_", *HEADS)
    assert trained == {n for n, _ in policy.named_parameters() if n.startswith(prefixes)}
    for family in ("qwen2", "opt", "bloom"):  # output layer tied to the embedding
        trained = {n for n, p in freeze(build(family)).named_parameters() if p.requires_grad}
        assert trained
        assert not any("emb" in n or "wpe" in n for n in trained)
    with pytest.raises(
        ConfigError, match="train_layers=5 must be at most 4, the layers of the pol"
    ):
        freeze(build(), 5)


def test_frozen_weights_are_held_once():
    policy = freeze(build())
    reference, value = frozen_copy(policy), freeze(build(head="score", seed=1), 2)
    weights = dict(policy.named_parameters())
    for name, p in reference.model.named_parameters():
        assert (p is weights[name]) == (not weights[name].requires_grad)
    equal = copy.deepcopy(policy).requires_grad_(False)
    share_frozen_weights(get_backbone(equal), get_backbone(policy))
    cached = module.BackboneCache([causal_parts(policy), causal_parts(equal)])
    assert len(cached._cached) == 2
    assert len(cached._below) == 1
    share_frozen_weights(get_backbone(value), get_backbone(policy))
    assert not {id(p) for p in value.parameters()} & {id(p) for p in policy.parameters()}


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_policy_and_value_train_their_top_layers_and_numbers_stay():
    logs = []
    for cache in (True, False):
        value = tiny_reward_model("llama", vocab_size=WORDS, layers=1)
        policy = tiny_policy("llama", vocab_size=WORDS, layers=3)
        trainer = small(model=policy, value_model=value, train_layers=2, cache_trunk=cache)
        trainer.train()
        assert {n.split(".")[2] for n in trained(policy) if "layers" in n} == {"1", "2"}
        assert trained(policy) >= {"lm_head.weight", "model.norm.weight"}
        assert "model.embed_tokens.weight" not in trained(policy) | trained(value)
        assert {n.split(".")[2] for n in trained(value) if "layers" in n} == {"0"}  # has one
        logs.append(rows(trainer))
    names = ("objective/scores", "objective/kl", "loss/policy", "loss/value", "grad_norm")
    for cached, plain in zip(*logs, strict=True):
        shared = [name for name in names if name in plain]
        assert shared
        for name in shared:
            assert cached[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_layers": 9}, "train_layers=9 must be at most 2, the layers of the policy"),
        (
            {"train_layers": 1, "peft_config": LoraConfig(task_type="CAUSAL_LM")},
            "but the policy trains an adapter; .*layers_to_transform",
        ),
        (
            {
                "train_layers": 1,
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            "needs use_reentrant=False",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        small(**changes)


def test_the_plan_counts_what_trains(tmp_path):
    tiny_policy(vocab_size=WORDS, layers=4).save_pretrained(tmp_path)
    small().processing_class.save_pretrained(tmp_path)
    flags = ["--model_name_or_path", str(tmp_path), "--total_episodes", "8", "--kl_coef", "0.1"]
    flags += ["--reward_funcs", "tests/e2e/small.py:length_reward", "--output_dir", str(tmp_path)]

    def models(*more):
        return plan(parse([*flags, *more], prog="kedge plan"))[2]

    (whole, reference, *_), (top, small_reference, *_) = models(), models("--train_layers", "1")
    total = whole.total
    assert whole.trained == reference.total == top.total == total
    assert top.trained == small_reference.total < total / 2
    assert top.optimizer < whole.optimizer / 2
    kept = top.activations - models("--train_layers", "1", "--cache_trunk", "False")[0].activations
    assert kept > 0


def test_a_resumed_run_must_train_the_same_layers(tmp_path, logged):
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    small(train_layers=1, **options).train()
    with (
        logged("train_layers: 1 in the checkpoint, null now"),
        pytest.raises(CheckpointError, match="the checkpoint's policy has 15 trained weights"),
    ):
        small(**options).train(resume_from_checkpoint=True)


PACKED = ["llama", "gpt2", "gpt_neox", "qwen2", "qwen3", "granite"]
REPEATED = torch.tensor([0, 2, 0, 0, 2, 1, 0, 4, 4])  # of these prompts, with other responses


def grouped():
    """Nine rows of four prompts; row 1 of each rollout has an empty response."""
    one = rollout(prompt=12)
    two = rollout(9, prompt=12, seed=1)
    rows = one.prompts.rows(REPEATED)
    return replace(two, prompts=replace(rows, group=REPEATED, row=torch.arange(9)))


@pytest.mark.parametrize("family", PACKED)
def test_joined_rows_have_the_states_and_gradients_of_separate_rows(family):
    backbone = tiny_policy(family, vocab_size=VOCAB).double().eval().base_model
    assert supports_packing(backbone)
    r = grouped()
    slots = torch.arange(SLOTS) <= r.response_mask.sum(1)[:, None]
    weight = torch.randn(int(slots.sum()) + len(r), backbone.config.hidden_size).double()
    results = []
    for joined in (True, False):
        packed = pack(r.prompts.ids, r.prompts.mask, r.ids, r.response_mask, joined=joined)
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


def test_a_model_with_our_attention_computes_what_it_did():
    model = tiny_policy("llama", vocab_size=VOCAB)
    ids = torch.arange(5)[None]
    expected = model(input_ids=ids).logits
    use_own_attention(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    padded = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, padded)
    run_packed(model.base_model, ids, [(5,)])
    assert model.config._attn_implementation == "kedge"


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
