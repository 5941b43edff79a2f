"""Reference workers: the log-probabilities of this process, through any death of theirs."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from kedge.records.errors import ConfigError
from kedge.testing import tiny_policy
from tests.e2e.small import VOCAB, small
from tests.on_ray.clusters import local, needs_ray
from tests.on_ray.test_engines import numbers

OPTIONS = {
    "total_episodes": 32,
    "per_device_train_batch_size": 8,
    "local_rollout_forward_batch_size": 2,  # several passes, for several workers
    "gradient_checkpointing": False,
    "temperature": 0.7,
    "min_new_tokens": 2,
}


@pytest.fixture(scope="module")
def workers():
    """Two workers, and a run that has them."""
    local()
    made = small(**OPTIONS, ray_ref_workers=2)
    yield made
    made.engine.learner.remote.close()


class TestOnRay:
    pytestmark = needs_ray

    @pytest.mark.smoke
    def test_a_run_has_the_numbers_of_one_without_ray(self, workers):
        want = numbers(small(**OPTIONS))
        assert workers.engine.learner.reference is None
        assert numbers(workers) == want
        assert len(want) == 4
        assert abs(want[-1]["objective/kl"]) > 1e-3

    def test_a_worker_that_dies_is_made_again_and_computes_its_share_once_more(self, workers):
        learner = workers.engine.learner
        one, two = learner.remote.workers
        rollout = workers.engine.rollout_engine.generate(
            workers.engine.source.batch(0), sampling=workers.engine.sampling, seed=0
        )

        def refer():
            return learner.compute_logprobs(rollout, values=False, reference=True, full_kl=False)

        want = refer().ref_logprobs
        assert float(want.abs().max()) > 0
        os.kill(one.process.pid, signal.SIGKILL)
        threading.Timer(0.01, os.kill, [two.process.pid, signal.SIGKILL]).start()
        assert torch.equal(refer().ref_logprobs, want)
        assert torch.equal(refer().ref_logprobs, want)
        assert one.restarts == 1
        assert two.restarts <= 1

    def test_a_reference_that_cannot_be_loaded_is_one_clear_error(self):
        with pytest.raises(ConfigError, match="no-such-model"):
            small(**OPTIONS, ray_ref_workers=1, ref_model="/no-such-model")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl_coef": 0.0}, "needs a KL term"),
        ({"kl_estimator": "full"}, "kl_estimator='full' needs"),
        ({"peft_config": {"r": 2}}, "the policy's base model"),
        ({"ray_ref_workers": 0, "ray_ref_gpus": 0.5}, "ray_ref_gpus=0.5 has no effect with"),
    ],
)
def test_workers_without_work_are_refused(changes, said, monkeypatch):
    monkeypatch.setattr("kedge.config.rollout_engines.installed", lambda name: True)
    model = tiny_policy("gpt_neox", vocab_size=VOCAB)
    if "peft_config" in changes:
        lora = pytest.importorskip("peft").LoraConfig
        changes = {"peft_config": lora(**changes["peft_config"])}
    with pytest.raises(ConfigError, match=said):
        small(**({"model": model, "ray_ref_workers": 1} | OPTIONS | changes))
