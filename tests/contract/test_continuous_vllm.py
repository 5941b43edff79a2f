"""Continuous sampling with vLLM: requests one by one, weights in flight."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kedge.ext.vllm import InProcess, inprocess, server
from kedge.records.types import Rollout, Sampling

from .embedded import drained, largest_gap, prompts
from .engines import needs_vllm, policy, server_of, trained, vllm_of
from .test_continuous_engine import numbered

pytestmark = needs_vllm
SAMPLING = Sampling(max_new_tokens=24, stop_ids=(5, 6, 7, 9))


@pytest.fixture(params=[vllm_of, pytest.param(server_of, marks=pytest.mark.slow)])
def engine(request: Any) -> Any:
    engine = request.param()
    engine.cancel()
    engine.load_weights(trained(policy()), 0)
    return engine


@pytest.mark.smoke
def test_requests_one_by_one_give_the_responses_of_whole_batches(engine: Any) -> None:
    batch = prompts(copies=3)
    want = engine.generate(batch, sampling=SAMPLING, seed=3)
    assert engine.info.slots >= 18
    engine.submit(batch, sampling=SAMPLING, seed=3)
    early = [engine.advance() for _ in range(2)]
    engine.submit(numbered(batch, 100), sampling=SAMPLING, seed=4)
    while_held = engine.generate(batch, sampling=SAMPLING, seed=3)  # as in an evaluation
    whole = Rollout.cat([*(x for x in early if x is not None), drained(engine)])
    whole = whole.rows(whole.prompts.group.argsort(stable=True))
    got = whole.rows(slice(0, 18))
    size = want.ids.shape[1]
    for rollout in (got, while_held):
        assert rollout.response_mask.sum(1).tolist() == want.response_mask.sum(1).tolist()
        assert torch.equal(rollout.ids[:, :size][want.loss_mask], want.ids[want.loss_mask])
    assert got.prompts.group.tolist() == batch.group.tolist()
    assert got.policy_version.tolist() == [0] * 18


def test_responses_continue_with_new_weights_and_every_token_has_its_version(
    engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = trained(policy())
    moved = {
        name: w + 0.05 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
        for name, w in weights.items()
    }
    assert engine.info.updates_in_flight
    engine.load_weights(weights, 3)
    in_process = isinstance(engine.service, InProcess)
    size = 40 if in_process else engine.max_length - 8  # a server does not wait for the test
    engine.submit(prompts(), sampling=Sampling(max_new_tokens=size), seed=0)
    assert engine.advance() is None  # 16 steps, or 0.1 seconds
    if not in_process:  # once later requests have ended, a server has begun with these
        engine.generate(prompts(), sampling=Sampling(max_new_tokens=8), seed=1)
    receipt = engine.load_weights(moved, 4)  # verified on the probe while requests are held
    assert receipt.version == 4
    rollout = drained(engine)
    assert rollout.policy_version.tolist() == [3] * 6
    versions = rollout.token_versions
    assert set(versions.flatten().tolist()) == {3, 4}
    assert bool((versions.diff(dim=1) >= 0).all())  # old tokens first
    count = (versions == 3).sum(1)
    assert bool((count >= (12 if in_process else 1)).all())
    assert bool((count <= (20 if in_process else size)).all())
    models = {3: policy(), 4: policy()}
    for version, model in models.items():
        model.load_state_dict(weights if version == 3 else moved, strict=False)
    worst = max(largest_gap(models, rollout, row) for row in range(6))
    assert worst < 1e-4  # with the keys and values that the old weights left
    # A new request with the same prompt does not read prefixes of the old weights.
    engine.submit(prompts(), sampling=Sampling(max_new_tokens=8), seed=0)
    fresh = drained(engine)
    engine.load_weights(moved, 5)  # nothing is held: caches are reset
    again = engine.generate(prompts(), sampling=Sampling(max_new_tokens=8), seed=0)
    assert torch.equal(fresh.ids, again.ids)
    assert "Failed to" not in "".join(capfd.readouterr())  # of RotaryEmbedding, and of the cache
    if in_process:
        assert any(handler.filters for handler in logging.getLogger("vllm").handlers)


def test_responses_that_end_during_a_weight_sync_are_returned(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its probe takes 4 steps; whoever samples until nothing is unfinished must get them."""
    monkeypatch.setattr(inprocess, "_STEPS", 1)
    monkeypatch.setattr(server, "_SECONDS", 0.0)
    engine.submit(prompts(), sampling=Sampling(max_new_tokens=3), seed=0)
    assert engine.advance() is None
    engine.load_weights(trained(policy()), 1)
    assert drained(engine).response_mask.sum(1).tolist() == [3] * 6
    assert engine.unfinished == 0
