"""One classic step: what it takes, does and refuses; scores, their moments and KL controllers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kedge.ext.trl.classic import PPOTrainer, RunningMoments
from kedge.ext.trl.classic.stats_recorder import KEYS
from tests.classic_models import bart, gpt2, lora, samples, t5, trainer

MAKERS = [gpt2, t5, bart]
pytestmark = pytest.mark.filterwarnings("ignore:the KL to the reference")


def weights(found: PPOTrainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in found.model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> bool:
    return all(torch.allclose(a[n], b[n], **tolerance) for n in a)


def after(changes: dict[str, Any], steps: int = 1, make: Any = gpt2, **kinds: Any) -> Any:
    found = trainer(make(), **changes)
    for i in range(steps):
        stats = found.step(*samples(seed=i, **kinds))
    return found, stats


@pytest.mark.parametrize("make", MAKERS)
def test_keys_and_first_step(make: Any) -> None:
    found = trainer(make(), ppo_epochs=1, learning_rate=1e-2)
    before = weights(found)
    queries, responses, scores = samples()
    stats = found.step(queries, responses, scores)
    assert list(stats) == list(KEYS)
    assert stats["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert stats["ppo/policy/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert stats["ppo/policy/approxkl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["ppo/mean_scores"] == pytest.approx(np.mean([float(s) for s in scores]), abs=1e-6)
    assert stats["ppo/std_scores"] == pytest.approx(
        np.std([float(s) for s in scores], ddof=1), abs=1e-6
    )
    assert stats["tokens/queries_len_mean"] == np.mean([len(q) for q in queries])
    assert stats["ppo/learning_rate"] == 1e-2
    assert stats["time/ppo/total"] > 0
    tokens = sum(map(len, responses))
    assert stats["ppo/policy/ratio"].shape == stats["ppo/policy/advantages"].shape == (tokens,)
    width = max(map(len, responses))
    if make is gpt2:
        width = max(len(q) + len(r) for q, r in zip(queries, responses, strict=True)) - 1
    assert stats["objective/logprobs"].shape == (8, width)
    assert not same(before, weights(found), atol=1e-4)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kl_penalty", ["kl", "abs", "mse", "full"])
def test_the_pieces_make_a_step(make: Any, kl_penalty: str) -> None:
    """Forward, rewards, advantages and train_minibatch by hand give the weights of ``step``."""
    options = {"ppo_epochs": 1, "kl_penalty": kl_penalty, "sgd": 0.1}
    whole, by_hand = (trainer(make(), mini_batch_size=8, **options) for _ in range(2))
    for found in (whole, by_hand):  # away from the reference
        found.step(*samples(seed=9))
    queries, responses, scores = samples(seed=1)
    stats = whole.step(queries, responses, scores)

    t = by_hand
    inputs = t.prepare_model_inputs(queries, responses)
    full = kl_penalty == "full"
    with torch.no_grad():
        old, logits, values, mask = t.batched_forward_pass(
            t.model, queries, responses, inputs, return_logits=full
        )
        ref, ref_logits, _, _ = t.batched_forward_pass(
            t.ref_model, queries, responses, inputs, return_logits=full
        )
        pair = (logits.log_softmax(-1), ref_logits.log_softmax(-1)) if full else (old, ref)
        rewards, penalty, kls = t.compute_rewards(torch.stack(scores), *pair, mask)
        values, advantages, returns = t.compute_advantages(values, rewards, mask)
    new, new_logits, vpreds, _ = t.batched_forward_pass(
        t.model, queries, responses, inputs, return_logits=True
    )
    train = t.train_minibatch(old, values, new, new_logits, vpreds, mask, advantages, returns)
    assert same(weights(whole), weights(by_hand), atol=1e-5)
    record = t.record_step_stats(
        t.kl_ctl.value,
        scores=torch.stack(scores),
        logprobs=old,
        ref_logprobs=ref,
        non_score_reward=penalty,
        train_stats=train,
        masks=mask,
        queries=queries,
        responses=responses,
        kls=kls,
    )
    for name, x in record.items():
        # step reports the coefficient it used; the pieces never moved theirs
        if np.ndim(x) == 0:
            assert x == pytest.approx(stats[name], rel=1e-3, abs=1e-4), name


def test_scores_of_each_token() -> None:
    queries, responses, scores = samples()
    dense = [torch.zeros(len(r)) for r in responses]
    for row, s in zip(dense, scores, strict=True):
        row[-1] = s
    one, other = trainer(gpt2()), trainer(gpt2())
    a, b = one.step(queries, responses, scores), other.step(queries, responses, dense)
    assert same(weights(one), weights(other), atol=1e-6)
    assert a["ppo/mean_scores"] == pytest.approx(b["ppo/mean_scores"], abs=1e-6)
    spread = [
        torch.full((len(r),), float(s) / len(r)) for r, s in zip(responses, scores, strict=True)
    ]
    third = trainer(gpt2())
    c = third.step(queries, responses, spread)
    assert c["ppo/mean_scores"] == pytest.approx(a["ppo/mean_scores"], abs=1e-6)
    assert not same(weights(one), weights(third), atol=1e-5)


def test_masked_tokens_get_no_loss() -> None:
    """Whatever stands at the end of a response, if it is masked it does not matter."""
    queries, responses, scores = samples()
    masks = [torch.arange(len(r)) < len(r) - 2 for r in responses]
    found = []
    for token in (7, 9):
        changed = [torch.where(m, r, token) for r, m in zip(responses, masks, strict=True)]
        found.append(trainer(gpt2(), sgd=0.1))
        found[-1].step(queries, changed, scores, masks)
    assert same(weights(found[0]), weights(found[1]), atol=1e-7)
    cut = trainer(gpt2(), sgd=0.1)
    cut.step(queries, [r[m] for r, m in zip(responses, masks, strict=True)], scores)
    assert same(weights(found[0]), weights(cut), atol=1e-6)
    unmasked = trainer(gpt2(), sgd=0.1)
    unmasked.step(queries, responses, scores)
    assert not same(weights(found[0]), weights(unmasked), atol=1e-5)


def test_a_mask_with_a_hole_is_stepped_over() -> None:
    queries, responses, scores = samples()
    masks = [torch.arange(len(r)) != 1 for r in responses]
    found = trainer(gpt2())
    stats = found.step(queries, responses, scores, masks)
    assert len(stats["ppo/policy/ratio"]) == 4 * sum(int(m.sum()) for m in masks)


def test_an_empty_response_takes_no_part() -> None:
    queries, responses, scores = samples()
    responses[3] = responses[3][:0]
    stats = trainer(gpt2()).step(queries, responses, scores)
    assert all(np.isfinite(x).all() for x in stats.values())
    with pytest.raises(ValueError, match="all responses of this batch are empty"):
        trainer(gpt2()).step(queries, [r[:0] for r in responses], scores)


def test_start_tokens_of_decoders_may_be_there_or_not() -> None:
    queries, responses, scores = samples()
    begun = [torch.cat([torch.tensor([1]), r]) for r in responses]
    one, other = trainer(t5()), trainer(t5())
    one.step(queries, responses, scores)
    other.step(queries, begun, scores)
    assert same(weights(one), weights(other), atol=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, r, s: (tuple(q), r, s), "queries must be a list of tensors, got tuple"),
        (lambda q, r, s: (q, r[:-1], s), "responses must have batch_size=8 entries, got 7"),
        (lambda q, r, s: (q, r, [1.0] * 8), r"scores\[0\] must be a tensor, got float"),
        (
            lambda q, r, s: (q, r, [x[None, None] for x in s]),
            r"scores\[0\] must be one number .* got shape \(1, 1\)",
        ),
        (
            lambda q, r, s: (q, r, [torch.zeros(3), *s[1:]]),
            r"scores\[0\] must be one number .* got shape \(3,\)",
        ),
        (
            lambda q, r, s: (q, r, [torch.tensor(float("nan")), *s[1:]]),
            r"scores\[0\] must be finite",
        ),
        (lambda q, r, s: ([x[None] for x in q], r, s), r"queries\[0\] must have .* got \(1, 3\)"),
        (
            lambda q, r, s: ([*q[:1], q[0][:0], *q[2:]], r, s),
            r"queries\[1\] must have at least one token",
        ),
        (
            lambda q, r, s: (q, r, s, [torch.ones(2)] * 8),
            r"response_masks\[0\] must have .* got \(2,\)",
        ),
    ],
)
def test_what_step_refuses(change: Any, message: str) -> None:
    found = trainer(gpt2())
    with pytest.raises(ValueError, match=message):
        found.step(*change(*samples()))
    found.step(*samples())  # and nothing is broken


def test_early_stopping_leaves_the_offending_step_out() -> None:
    """The second optimizer step is the first to start away from the policy that sampled."""
    once, _ = after({"ppo_epochs": 1})
    twice, stats = after({"ppo_epochs": 2})
    assert stats["ppo/policy/policykl"] > 0  # the limit is one-sided, as in TRL
    limits = {"early_stopping": True, "target_kl": 1e-9, "ppo_epochs": 4}
    for keep, want in ((False, once), (True, twice)):
        found, stats = after(limits | {"early_stopping_keeps_step": keep})
        assert len(stats["ppo/policy/ratio"]) == 2 * sum(map(len, samples()[1]))
        assert same(weights(found), weights(want), atol=0.0)


def test_a_high_ratio_leaves_everything_as_it_was() -> None:
    found = trainer(gpt2(), ratio_threshold=0.5)
    before = weights(found)
    found.step(*samples())
    assert same(before, weights(found), atol=0.0)
    assert not found.optimizer.state


def test_gradients_are_clipped_at_every_step() -> None:
    model = gpt2()
    found = trainer(model, max_grad_norm=1e-3, ppo_epochs=1, sgd=1.0)
    for i in range(3):
        before = weights(found)
        found.step(*samples(seed=i))
        moved = torch.cat([(p - before[n]).flatten() for n, p in weights(found).items()])
        assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-2)


def test_shared_layers_stay() -> None:
    found = trainer(gpt2(), num_shared_layers=1)
    before = weights(found)
    found.step(*samples())
    moved = {n for n, p in weights(found).items() if not torch.equal(p, before[n])}
    assert "pretrained_model.transformer.h.1.mlp.c_fc.weight" in moved
    assert not [n for n in moved if ".h.0." in n or ".wte." in n]
    ref = dict(found.ref_model.named_parameters())
    assert ref["pretrained_model.transformer.wte.weight"] is found.model.get_parameter(
        "pretrained_model.transformer.wte.weight"
    )


@pytest.mark.parametrize("make", [gpt2, t5])
def test_adapters_train_on_a_frozen_base(make: Any) -> None:
    pytest.importorskip("peft")
    adapter = lora()
    if make is t5:
        adapter = lora(target_modules=["q", "v"], fan_in_fan_out=False, task_type="SEQ_2_SEQ_LM")
    found = trainer(make(), peft_config=adapter, ppo_epochs=2, learning_rate=1e-2)
    assert found.ref_model is None
    assert found.is_peft_model
    before = weights(found)
    first = found.step(*samples())
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    moved = {n for n, p in weights(found).items() if not torch.equal(p, before[n])}
    places = {n.split(".")[3] for n in moved if "lora" in n}
    assert places == ({"encoder", "decoder"} if make is t5 else {"transformer"})
    assert all("lora" in n or n.startswith("v_head") for n in moved)
    assert abs(found.step(*samples())["objective/kl"]) > 1e-3


def test_recomputed_activations_change_nothing_but_memory() -> None:
    plain, _ = after({"ppo_epochs": 2})
    spared, _ = after({"ppo_epochs": 2, "gradient_checkpointing": True})
    layers = spared.model.pretrained_model.transformer.h
    assert all(layer.gradient_checkpointing for layer in layers)
    assert same(weights(plain), weights(spared), atol=1e-5)
    queries, _, _ = samples()
    assert len(spared.generate(queries, max_new_tokens=2)) == 8


def test_the_schedule_moves_once_per_step() -> None:
    model = gpt2()
    found = trainer(model, sgd=1.0, decay=0.5)
    rates = [found.step(*samples())["ppo/learning_rate"] for _ in range(3)]
    assert rates == [1.0, 0.5, 0.25]


def test_running_moments() -> None:
    moments, seen = RunningMoments(), []
    for size in (1, 5, 3):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3 + 2
        seen.append(x)
        mean, _ = moments.update(x)
        assert mean == pytest.approx(float(x.mean()), abs=1e-6)
    every = torch.cat(seen).double()
    assert moments.mean == pytest.approx(float(every.mean()))
    assert moments.std == pytest.approx(float(every.std()))
    assert moments.count == 9


@pytest.mark.parametrize("norm", [False, True])
def test_score_scaling_and_clipping(norm: bool) -> None:
    found = trainer(gpt2(), use_score_scaling=True, use_score_norm=norm, score_clip=1.5)
    seen: list[float] = []
    for i in range(3):
        queries, responses, scores = samples(seed=i)
        stats = found.step(queries, responses, scores)
        seen += [float(s) for s in scores]
        std, mean = np.std(seen, ddof=1), np.mean(seen) if norm else 0.0
        want = np.clip((np.array([float(s) for s in scores]) - mean) / std, -1.5, 1.5)
        assert stats["ppo/mean_scores"] == pytest.approx(want.mean(), abs=1e-5)
        assert stats["ppo/std_scores"] == pytest.approx(want.std(ddof=1), abs=1e-5)


def test_kl_controllers() -> None:
    adaptive, stats = after({"horizon": 80.0, "target": 6.0}, steps=2)
    error = np.clip(stats["objective/kl"] / 6.0 - 1, -0.2, 0.2)
    used = stats["objective/kl_coef"]
    assert adaptive.kl_ctl.value == pytest.approx(used * (1 + error * 8 / 80))
    fixed, stats = after({"adap_kl_ctrl": False}, steps=2)
    assert fixed.kl_ctl.value == stats["objective/kl_coef"] == 0.2
