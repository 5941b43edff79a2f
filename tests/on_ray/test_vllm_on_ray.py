"""Real vLLM in Ray actors: it agrees with the learner, or it is an error."""

from __future__ import annotations

import functools
import os
import signal
import threading

import pytest
import torch

from kedge.errors import SyncError
from kedge.types import Sampling
from tests.contract.engines import has_vllm, needs_vllm
from tests.contract.test_rollout_engine import prompts
from tests.e2e.test_vllm import UPDATES, agreement, trainer
from tests.on_ray.clusters import local, needs_ray

pytestmark = [*needs_ray, *needs_vllm]
ON_RAY = {"rollout_engine": "ray", "vllm_num_engines": 2}


@pytest.fixture(autouse=True, scope="module")
def cluster():
    if has_vllm:
        local()


def stories(shared, folder, **changes):
    """The sentiment run, short: 32 prompts an update, 24 tokens."""
    from benchmarks.stories_on_ray import trainer as full

    made = full(
        "synchronous",
        0,
        10,
        output_dir=str(folder),
        per_device_train_batch_size=32 // int(os.environ.get("WORLD_SIZE", "1")),
        response_length=24,
        **changes,
    )
    made.train()
    close = getattr(made.engine.rollout_engine, "close", None)
    if close is not None:
        close()
    rows = [row for row in made.state.log_history if "objective/scores" in row]
    names = ("objective/scores", "rollout/lag", "rollout/logprob_gap")
    return [[row.get(name, 0.0) for name in names] for row in rows]


@pytest.mark.slow
def test_two_learners_and_vllm_one_update_apart_learn_what_the_synchronous_trainer_does(
    shared, tmp_path
):
    from kedge.ray import LaunchLimits, launch

    want = stories(shared, tmp_path / "here")
    apart = {**ON_RAY, "max_lag": 1, "sampler_correction": "truncate"}
    found = launch(
        functools.partial(stories, shared, tmp_path / "ray", **apart),
        learners=[2],
        engines=2,
        limits=LaunchLimits(placement=30.0),
        say=lambda text: None,
    )
    assert [lag for _, lag, _ in found] == [0] + [1] * 9
    assert max(gap for *_, gap in found) < 1e-4
    first, last = found[0][0], sum(score for score, *_ in found[-3:]) / 3
    reached = sum(score for score, *_ in want[-3:]) / 3
    assert reached - want[0][0] > 1.0
    assert last - first > 0.6 * (reached - want[0][0])


def send_to_the_second(monkeypatch):
    """The first engine gets weights from the object store, the second by vLLM's own transfer."""
    from kedge.ray import service
    from kedge.rollout.vllm.nccl_transfer import EngineGroup, NcclTransfer
    from tests.contract.relay import Relayed, info

    plain = service.RayService

    def make(name, *args, **named):
        group = EngineGroup(
            1,
            1,
            lambda control: NcclTransfer(control, info(), limit=120.0, device=torch.device("cpu")),
            limit=120.0,
        )
        return plain(name, *args, **named | {"group": None if name == "engine 0" else group})

    monkeypatch.setattr(service, "RayService", make)
    monkeypatch.setattr(service, "InProcess", Relayed)


def test_two_engines_agree_with_the_learner_and_a_skipped_sync_is_caught(
    shared, tmp_path, monkeypatch
):
    send_to_the_second(monkeypatch)
    made = trainer(shared, tmp_path, **ON_RAY)
    engine = made.engine.rollout_engine
    try:
        made.train()
        gap, kl = agreement(made)
        assert gap <= 1e-4
        assert kl <= 1e-4
        one, two = (each.service for each in engine.engines)
        weights = made.engine.learner.weights()
        receipt = engine.load_weights(weights, UPDATES)
        assert receipt.fingerprint == made.engine.learner.fingerprint()
        batch = prompts(copies=4)
        fixed = Sampling(max_new_tokens=64)
        want = engine.generate(batch, sampling=fixed, seed=3)
        for restarts in ((1, 0), (1, 1)):
            struck = two if restarts[1] else one
            timer = threading.Timer(0.2, os.kill, [struck.actor.pid, signal.SIGKILL])
            timer.start()
            found = engine.generate(batch, sampling=fixed, seed=3)
            timer.join()
            again = engine.generate(batch, sampling=fixed, seed=3)
            assert (one.actor.restarts, two.actor.restarts) == restarts
            assert torch.equal(found.ids, want.ids)
            assert torch.equal(again.ids, want.ids)
            assert found.version.tolist() == [UPDATES] * 24
        assert engine.load_weights(weights, UPDATES) == receipt
        # The second engine believes that it has new weights and keeps the old ones.
        monkeypatch.setattr(two, "load", lambda payload, version: None)
        monkeypatch.setattr(two, "version", lambda: UPDATES + 1)
        moved = {name: x + 0.01 * torch.randn_like(x) for name, x in weights.items()}
        with pytest.raises(SyncError, match=f"loading version {UPDATES + 1} had no effect"):
            engine.load_weights(moved, UPDATES + 1)
    finally:
        engine.close()
