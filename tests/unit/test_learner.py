"""The learner on transformers: what it says of rows, and what an optimizer step does."""

import math
from dataclasses import replace

import pytest
import torch

from kedge.learner.learner_state import WeightCopier
from kedge.learner.reference import FrozenModel
from kedge.models.fingerprint import fingerprint
from kedge.records.errors import ConfigError, DataError, KedgeError
from kedge.testing import tiny_policy
from tests.learners import (
    VOCAB,
    Recorder,
    arguments,
    experience,
    learner,
    random_head,
    rollout,
    take_step,
)

FAMILIES = ["llama", "gpt2", "gpt_neox", "qwen2"]


def by_definition(model, value, r):
    """Left-padded, with an attention mask and positions: log-probs, entropy, values [B, R]."""
    ids = torch.cat([r.prompts.ids, r.ids], 1)
    mask = torch.cat([r.prompts.mask, r.response_mask], 1)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    width = r.prompts.ids.shape[1]
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
    logp = model(**inputs).logits[:, width - 1 : -1].log_softmax(-1)
    values = value.head(value.backbone(**inputs).last_hidden_state)[:, width - 1 :, 0]
    chosen = logp.gather(2, r.ids[:, :, None])[:, :, 0]
    return chosen, -(logp.exp() * logp).sum(-1), values


OTHERS = {
    "mistral": {"sliding_window": 4, "head_dim": 8},
    "gemma2": {"final_logit_softcapping": 0.5, "sliding_window": 4, "head_dim": 8},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
}


@pytest.mark.parametrize("spare", [0, 10_000])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_annotation_equals_a_left_padded_masked_forward(family, spare):
    r = rollout()
    policy = tiny_policy(family, vocab_size=VOCAB, **OTHERS.get(family, {}))
    found = learner(family if family in FAMILIES else "llama", policy=policy, padding_budget=spare)
    other = tiny_policy(family, vocab_size=VOCAB, seed=5, **OTHERS.get(family, {}))
    found.reference = FrozenModel(other)
    note = found.compute_logprobs(r, values=True, reference=True, full_kl=True)
    with torch.no_grad():
        logp, entropy, values = by_definition(found.policy, found.value, r)
        ref, _, _ = by_definition(other, found.value, r)
    at = r.response_mask
    torch.testing.assert_close(note.logprobs, logp * at, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(note.entropy, entropy * at, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(note.ref_logprobs, ref * at, atol=2e-5, rtol=1e-5)
    lengths = at.sum(1)
    slots = torch.arange(at.shape[1]) <= lengths[:, None]
    torch.testing.assert_close(note.values, values[:, :-1] * slots, atol=2e-5, rtol=1e-5)
    want = values.gather(1, lengths[:, None])[:, 0]
    torch.testing.assert_close(note.last_values, want, atol=2e-5, rtol=1e-5)
    assert (note.full_kl[at] > 0).all()
    assert not note.full_kl[~at].any()


def test_stop_tokens_that_could_not_be_drawn_are_left_out():
    r = rollout()
    stop = 5
    r = replace(r, ids=torch.where(r.ids == stop, 6, r.ids))
    found = learner(min_new_tokens=3, stop_ids=(stop,), temperature=0.7)
    note = found.compute_logprobs(r, values=False, reference=False, full_kl=False)
    with torch.no_grad():
        row = int((r.response_mask.sum(1) > 4).nonzero()[0])
        ids = torch.cat([r.prompts.ids[row][r.prompts.mask[row]], r.ids[row]])
        z = found.policy(input_ids=ids[None]).logits[0, -r.ids.shape[1] - 1 : -1] / 0.7
        z[:3, stop] = -math.inf
        want = z.log_softmax(-1).gather(1, r.ids[row][:, None])[:, 0]
    torch.testing.assert_close(
        note.logprobs[row], want * r.response_mask[row], atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_clipped_per_model_and_the_norm_is_the_one_before(shared):
    def run(limit):
        torch.manual_seed(0)
        value = random_head(32) if shared else "model"
        found = learner(value=value, max_grad_norm=limit)
        trained = found._trained()
        recorder = found.optimizer = Recorder([p for ps in trained.values() for p in ps])
        metrics, grads = take_step(found), iter(recorder.seen[0])
        sides = ([next(grads) for _ in ps] for ps in trained.values())
        return metrics, [torch.cat([g.flatten() for g in side if g is not None]) for side in sides]

    before, raw = run(0.0)
    parts = [before["grad_norm/policy"], before["grad_norm/value"]]
    assert parts == pytest.approx([float(x.norm()) for x in raw], rel=1e-5)
    assert before["grad_norm"] == pytest.approx(math.hypot(*parts), rel=1e-6)
    limit = max(parts) / 10
    after, clipped = run(limit)
    assert after["grad_norm"] == pytest.approx(before["grad_norm"])
    if shared:  # one network, one norm
        parts = [before["grad_norm"]] * 2
    for x, y, norm in zip(raw, clipped, parts, strict=True):
        torch.testing.assert_close(y, x * min(1.0, limit / norm), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(("shared", "limit"), [(False, 0.0), (True, 0.0), (False, 1e-4)])
def test_only_value_leaves_the_policy_alone(shared, limit):
    value = random_head(32) if shared else "model"
    found = learner(value=value, max_grad_norm=limit)
    print_before = found.fingerprint()
    value_before = fingerprint(dict(found.value.named_parameters()))
    metrics = take_step(found, only_value=True)
    assert found.fingerprint() == print_before
    assert fingerprint(dict(found.value.named_parameters())) != value_before
    assert metrics["grad_norm/policy"] == 0
    assert metrics["val/ratio"] > 0
    take_step(found)
    assert found.fingerprint() != print_before


def test_value_learning_rate_is_its_own():
    found = learner(value_learning_rate=0.0)
    value_before = fingerprint(dict(found.value.named_parameters()))
    policy_before = found.fingerprint()
    assert take_step(found)["lr"] == 1e-2
    assert fingerprint(dict(found.value.named_parameters())) == value_before
    assert found.fingerprint() != policy_before


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("linear", 0, [1.0, 0.75, 0.5, 0.25]),
        ("constant_with_warmup", 2, [0.0, 0.5, 1.0, 1.0]),
        ("constant_with_warmup", 0.5, [0.0, 0.5, 1.0, 1.0]),  # a share of the iterations
    ],
)
def test_schedule_moves_once_per_batch(kind, warmup, expected):
    args = arguments(lr_scheduler_type=kind, warmup_steps=warmup, learning_rate=1.0)
    found = learner(args=args, total_iterations=4)
    rates = []
    for _ in range(4):
        take_step(found)
        rates.append(take_step(found)["lr"])
        found.advance_version()
    assert rates == expected


def test_weight_decay_spares_biases_and_norms():
    found = learner("gpt_neox", args=arguments(weight_decay=0.1))
    decayed = {
        id(p) for g in found.optimizer.param_groups if g["weight_decay"] for p in g["params"]
    }
    for name, p in found.policy.named_parameters():
        assert (id(p) in decayed) == (p.ndim > 1), name


def test_a_gradient_that_is_not_finite_is_skipped_then_raised():
    found = learner()
    before = found.fingerprint()
    batch = experience(rollout())
    bad = replace(batch, advantages=torch.full_like(batch.advantages, math.inf))
    metrics = take_step(found, bad)
    assert metrics["skipped_steps"] == 1
    assert "grad_norm" not in metrics
    assert found.version == 0
    assert found.fingerprint() == before
    take_step(found)
    assert found.fingerprint() != before
    take_step(found, bad)
    take_step(found, bad)
    with pytest.raises(KedgeError, match="3 optimizer steps in a row"):
        take_step(found, bad)


def test_recorded_logprobs_are_reused_only_while_they_are_of_these_weights():
    r = rollout()
    recorded = torch.full(r.ids.shape, -1.0)
    r = replace(r, behavior_logprobs=recorded)
    found = learner(reuse_behavior_logprobs=True)
    note = found.compute_logprobs(r, values=True, reference=True, full_kl=False)
    assert note.logprobs is recorded
    assert note.entropy is None
    take_step(found)
    note = found.compute_logprobs(r, values=True, reference=True, full_kl=False)
    assert note.logprobs is not recorded
    assert note.entropy is not None


def test_weights_are_copies_and_keep_the_fingerprint_of_the_weights_in_another_dtype():
    found = learner()
    exact = found.weights()
    assert fingerprint(exact) == found.fingerprint()
    take_step(found)
    assert fingerprint(exact) != found.fingerprint()
    exact = found.weights()
    found.copy_weights = WeightCopier(dtype=torch.bfloat16)
    copied = found.weights()
    assert copied.fingerprint == found.fingerprint()
    assert copied.keys() == exact.keys()
    assert all(torch.equal(x, exact[name].bfloat16()) for name, x in copied.items())


def test_low_precision_weights_are_refused_with_the_reason():
    low = tiny_policy(vocab_size=VOCAB).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="swallows an update smaller than 1/256"):
        learner(policy=low)
    learner(policy=low, allow_low_precision_weights=True)


def test_autocast_keeps_float32_weights():
    exact, r = learner(), rollout()
    low = learner(args=arguments(bf16=True), precision="bf16")
    a = exact.compute_logprobs(r, values=True, reference=False, full_kl=False)
    b = low.compute_logprobs(r, values=True, reference=False, full_kl=False)
    assert a.logprobs.dtype == b.logprobs.dtype == torch.float32
    assert not torch.equal(a.logprobs, b.logprobs)
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=0.05, rtol=0.05)
    take_step(low)
    assert {p.dtype for p in low.policy.parameters()} == {torch.float32}


def test_an_empty_prompt_is_named():
    r = rollout()
    mask = r.prompts.mask.clone()
    mask[2] = False
    with pytest.raises(DataError, match=r"rows \[2\]"):
        learner().compute_logprobs(
            replace(r, prompts=replace(r.prompts, mask=mask)),
            values=False,
            reference=False,
            full_kl=False,
        )


@pytest.mark.parametrize("value", ["model", None])
def test_a_pass_without_values_leaves_the_value_model_out(value):
    batch, found = experience(rollout()), learner(value=value)
    expected = found.forward_no_grad(batch).logprobs
    if value is not None:
        found.value.forward = None
    output = found.forward_no_grad(batch, values=False)
    assert output.values is None
    torch.testing.assert_close(output.logprobs, expected)
