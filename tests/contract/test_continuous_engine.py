"""Continuous sampling with the embedded engine: the same responses, from refilled slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge.models.fingerprint import policy_weights
from kedge.records.types import PromptBatch, Rollout, Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy

from .embedded import FAMILIES, PAD, drained, largest_gap, policy, prompts

SAMPLING = Sampling(max_new_tokens=24, stop_ids=(5, 6, 7, 9))
WITHOUT_SLOTS = ("bloom", "mistral", "gemma2", "lfm2")  # no positions, windows, recurrent layers


def embedded(model: Any, slots: int = 4, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, pad_id=PAD, shares_weights=False, chunk_rows=slots, **options)


def numbered(batch: PromptBatch, first: int = 0) -> PromptBatch:
    return replace(batch, group=batch.group + first)


def assert_same(got: Rollout, want: Rollout) -> None:
    assert got.prompts.row.tolist() == want.prompts.row.tolist()
    assert got.response_mask.sum(1).tolist() == want.response_mask.sum(1).tolist()
    size = want.ids.shape[1]
    assert got.ids[:, :size][want.loss_mask].tolist() == want.ids[want.loss_mask].tolist()
    assert got.terminated.tolist() == want.terminated.tolist()
    torch.testing.assert_close(
        got.behavior_logprobs[:, :size], want.behavior_logprobs, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_refilled_slots_give_the_responses_of_whole_batches(family: str) -> None:
    engine, batch = embedded(policy(family)), prompts(copies=3)
    if family in WITHOUT_SLOTS:
        assert engine.slots == 0
        return
    assert engine.slots == 4
    want = engine.generate(batch, sampling=SAMPLING, seed=3)
    assert 0 < int(want.terminated.sum()) < len(want)  # some end early, some at the limit
    engine.submit(batch, sampling=SAMPLING, seed=3)
    assert engine.unfinished == 18
    assert_same(drained(engine), want)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_new_tokens": 9},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 8},
        {"top_p": 0.8},
        {"stop_ids": ()},
    ],
)
def test_every_distribution_is_that_of_whole_batches(changes: dict[str, Any]) -> None:
    engine, batch = embedded(policy()), prompts(copies=2)
    sampling = replace(SAMPLING, **changes)
    want = engine.generate(batch, sampling=sampling, seed=3)
    engine.submit(batch, sampling=sampling, seed=3)
    got = drained(engine)
    assert_same(got, want)
    assert (got.allowed_tokens is None) == (want.allowed_tokens is None)
    if want.allowed_tokens is not None and got.allowed_tokens is not None:
        for a, b in zip(
            got.allowed_tokens[:, : want.ids.shape[1]][want.loss_mask].tolist(),
            want.allowed_tokens[want.loss_mask].tolist(),
            strict=True,
        ):
            assert set(a) - {-1} == set(b) - {-1}


def test_requests_may_be_added_at_any_time() -> None:
    engine, batch = embedded(policy()), prompts(copies=2)
    first, second = (engine.generate(batch, sampling=SAMPLING, seed=seed) for seed in (3, 4))
    engine.submit(batch, sampling=SAMPLING, seed=3)
    early = [engine.advance() for _ in range(3)]
    engine.submit(numbered(batch, 100), sampling=SAMPLING, seed=4)
    whole = Rollout.cat([*(x for x in early if x is not None), drained(engine)])
    whole = whole.rows(whole.prompts.group.argsort(stable=True))
    assert_same(whole.rows(slice(0, 12)), first)
    assert_same(whole.rows(slice(12, 24)), second)


def test_requests_of_different_lengths_and_distributions_are_held_together() -> None:
    engine, batch = embedded(policy()), prompts(copies=2)
    kinds = [replace(SAMPLING, max_new_tokens=n) for n in (5, 24, 11)]
    kinds.append(replace(SAMPLING, temperature=0.0, max_new_tokens=9))
    want = [engine.generate(batch, sampling=s, seed=n) for n, s in enumerate(kinds)]
    for n, sampling in enumerate(kinds):
        engine.submit(numbered(batch, 100 * n), sampling=sampling, seed=n)
    got = drained(engine)
    for n, expected in enumerate(want):
        assert_same(got.rows(slice(12 * n, 12 * n + 12)), expected)


def test_rows_may_end_at_the_last_position_of_the_model() -> None:
    """One row ends there, in a batch that goes on; GPT-2 has no position after it."""
    engine = embedded(tiny_policy("gpt2", max_positions=64), slots=8)
    ids, lengths = torch.randint(8, 64, (8, 54)), torch.tensor([54] + [5] * 7)
    batch = PromptBatch(
        ids=ids,
        mask=torch.arange(54) >= 54 - lengths[:, None],
        group=torch.arange(8),
        row=torch.arange(8),
        limit=64 - lengths,
    )
    sampling = Sampling(max_new_tokens=50)
    engine.submit(batch, sampling=sampling, seed=1)
    assert_same(drained(engine), want := engine.generate(batch, sampling=sampling, seed=1))
    assert want.response_mask.sum(1).tolist() == [10] + [50] * 7


def test_a_group_that_is_held_is_refused() -> None:
    engine = embedded(policy())
    engine.submit(prompts(), sampling=SAMPLING, seed=0)
    with pytest.raises(ValueError, match="group 0 is being sampled"):
        engine.submit(prompts(), sampling=SAMPLING, seed=0)
    engine.cancel()
    assert engine.unfinished == 0
    assert engine.advance() is None
    engine.submit(prompts(), sampling=SAMPLING, seed=0)


def test_responses_continue_with_new_weights_and_every_token_has_its_version() -> None:
    """Up to the keys and values that the old weights left in the cache."""
    model, other = policy(), policy()
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    engine = embedded(model, slots=6)
    engine.load_weights(policy_weights(model), 3)
    engine.submit(prompts(), sampling=Sampling(max_new_tokens=40), seed=0)  # all of equal length
    assert engine.advance() is None  # 16 tokens
    engine.load_weights(policy_weights(other), 4)
    rollout = drained(engine)
    assert rollout.policy_version.tolist() == [3] * 6  # of the oldest token
    assert rollout.token_versions.tolist() == [[3] * 16 + [4] * 24] * 6
    for models, low, high in (({3: model, 4: other}, 0, 1e-5), ({3: model, 4: model}, 0.1, 99)):
        assert low <= max(largest_gap(models, rollout, row) for row in range(6)) < high


def test_a_fixed_schedule_replays_bitwise() -> None:
    def run() -> Rollout:
        engine = embedded(policy())
        weights = policy_weights(policy())
        parts = []
        for n in range(5):
            engine.load_weights({k: v * (1 + 0.01 * n) for k, v in weights.items()}, n)
            engine.submit(numbered(prompts(copies=2), 10 * n), sampling=SAMPLING, seed=n)
            parts.append(engine.advance())
        rollout = Rollout.cat([*(x for x in parts if x is not None), drained(engine)])
        return rollout.rows(rollout.prompts.group.argsort(stable=True))

    first, second = run(), run()
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.behavior_logprobs, second.behavior_logprobs)
    assert torch.equal(first.token_versions, second.token_versions)
    ages = first.token_versions[first.loss_mask]
    assert int(ages.min()) == 0
    assert int(ages.max()) == 4
