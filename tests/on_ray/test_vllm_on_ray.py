"""Real vLLM in Ray actors: it agrees with the learner, or it is an error."""

from __future__ import annotations

import functools
import os
import signal
import threading

import pytest
import torch

from kedge.ext.vllm import InProcess
from kedge.records.errors import SyncError
from kedge.records.types import Sampling
from tests.contract.embedded import prompts
from tests.contract.engines import has_vllm, needs_vllm
from tests.e2e.small import rows
from tests.e2e.test_vllm import UPDATES, agreement, trainer
from tests.on_ray.clusters import local, needs_ray

pytestmark = [*needs_ray, *needs_vllm]
ON_RAY = {"rollout_engine": "ray", "vllm_num_engines": 2}


@pytest.fixture(autouse=True, scope="module")
def cluster():
    if has_vllm:
        local()


def two_updates(shared, folder):
    """Gap (nats per token) and KL of vLLM and this rank after two updates, and the lags."""
    made = trainer(shared, folder, updates=2, per_device_train_batch_size=8, max_lag=1, **ON_RAY)
    made.train()
    found = *agreement(made), [row["rollout/lag"] for row in rows(made)]
    made.engine.rollout_engine.close()
    return found


@pytest.mark.slow
def test_two_learners_share_vllms_that_agree_with_them(shared, tmp_path):
    from kedge.ext.ray import LaunchLimits, launch

    gap, kl, lags = launch(
        functools.partial(two_updates, shared, tmp_path),
        learners=[2],
        engines=2,
        limits=LaunchLimits(placement=30.0),
    )
    assert max(gap, kl) <= 1e-4
    assert lags == [0, 1]


class Forgetful(InProcess):
    """Believes that it has weights of the version after ``UPDATES``, and keeps the old ones."""

    def load(self, payload, version):
        super().load(payload, version) if version <= UPDATES else self.finish_load(version)


def send_to_the_second(monkeypatch):
    """The first engine gets weights from the object store, the second by vLLM's own transfer."""
    from kedge.ext.ray import engine
    from kedge.ext.vllm.weights import NcclGroup
    from tests.contract.relay import Relayed, info

    plain = engine.RayEngine
    about = {"gpus": 1, "address": "127.0.0.1", "limit": 120.0, "device": torch.device("cpu")}

    def make(name, *, settings, template, group, **named):
        arguments = settings["service"].keywords
        kind = Forgetful
        if name == "engine 1":
            kind, group = Relayed, NcclGroup(template.payload, **about)
            group.info = lambda workers: info()
        settings = settings | {"service": functools.partial(kind, **arguments)}
        return plain(name, settings=settings, template=template, group=group, **named)

    monkeypatch.setattr(engine, "RayEngine", make)


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
        one, two = engine.engines
        weights = made.engine.learner.weights()
        receipt = engine.load_weights(weights, UPDATES)
        assert receipt.fingerprint == made.engine.learner.fingerprint()
        batch = prompts(copies=4)
        fixed = Sampling(max_new_tokens=64)
        want = engine.generate(batch, sampling=fixed, seed=3)
        for restarts in ((1, 0), (1, 1)):
            struck = two if restarts[1] else one
            timer = threading.Timer(0.2, os.kill, [struck.actor.process.pid, signal.SIGKILL])
            timer.start()
            found = engine.generate(batch, sampling=fixed, seed=3)
            timer.join()
            again = engine.generate(batch, sampling=fixed, seed=3)
            assert (one.actor.restarts, two.actor.restarts) == restarts
            assert torch.equal(found.ids, want.ids)
            assert torch.equal(again.ids, want.ids)
            assert found.policy_version.tolist() == [UPDATES] * 24
        assert engine.load_weights(weights, UPDATES) == receipt
        moved = {name: x + 0.01 * torch.randn_like(x) for name, x in weights.items()}
        with pytest.raises(SyncError, match=f"loading version {UPDATES + 1} had no effect"):
            engine.load_weights(moved, UPDATES + 1)
    finally:
        engine.close()
