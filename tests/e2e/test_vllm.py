"""PPO on a real model with real vLLM engines: they agree with the learner, or it is an error."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import replace

import pytest

from kedge import PPOConfig, PPOTrainer
from kedge.ext.vllm.server import Process, Server
from kedge.records.errors import ConfigError, SyncError
from tests.contract.engines import needs_vllm

pytestmark = needs_vllm
UPDATES = 20


def letters(completions, **_):
    return [text.count("e") / 10 for text in completions]


def trainer(shared, folder, *, updates=UPDATES, prompts=64, engine=None, **options):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = shared / "data" / "stories-head32"
    rows = (shared / "data" / "story-prompts").rglob("*.jsonl")
    lines = next(rows).read_text().splitlines()[:prompts]
    return PPOTrainer(
        args=PPOConfig(
            output_dir=str(folder),
            **{
                "total_episodes": 16 * updates,
                "per_device_train_batch_size": 16,
                "response_length": 16,
                "num_ppo_epochs": 1,
                "learning_rate": 3e-4,
                "stop_token": "eos",
                "num_sample_generations": 0,
                "logging_steps": 1,
                "rollout_engine": "vllm" if engine is None else "embedded",
                **options,
            },
        ),
        processing_class=AutoTokenizer.from_pretrained(place, padding_side="left"),
        model=AutoModelForCausalLM.from_pretrained(place),
        reward_funcs=[letters],
        train_dataset=[{"prompt": json.loads(line)["prompt"]} for line in lines],
        rollout_engine=engine,
    )


def agreement(made):
    """Mean gap (nats per token) and KL(engine || learner), estimated by k3, of fresh samples."""
    engine = made.engine
    prompts = engine.source.batch(0)
    rollout = engine.rollout_engine.generate(prompts, sampling=engine.sampling, seed=99)
    asked = {"values": False, "reference": False, "full_kl": False}
    note = engine.learner.compute_logprobs(replace(rollout, behavior_logprobs=None), **asked)
    ours, theirs = (
        x[rollout.loss_mask].double() for x in (note.logprobs, rollout.behavior_logprobs)
    )
    ratio = ours - theirs
    return float(ratio.abs().mean()), float((ratio.exp() - 1 - ratio).mean())


@pytest.fixture
def close():
    made = []
    yield made.append
    for each in made:
        each.engine.rollout_engine.close()


@pytest.fixture(scope="module", params=["vllm", "vllm_server"])
def begun(request, shared, tmp_path_factory):
    """A run that has not trained, with an engine of its own."""
    made = trainer(shared, tmp_path_factory.mktemp("run"), rollout_engine=request.param)
    yield made
    made.engine.rollout_engine.close()


def test_the_engine_agrees_with_the_learner_after_20_updates(begun):
    start = {n: x.clone() for n, x in begun.engine.learner.weights().items()}  # they are live
    begun.train()
    assert begun.engine.step == UPDATES
    trained = begun.engine.learner.weights()
    assert max(float((p - start[n]).abs().max()) for n, p in trained.items()) > 1e-3
    gap, kl = agreement(begun)
    assert gap <= 1e-4
    assert kl <= 1e-4
    scores = [
        row["objective/scores"] for row in begun.state.log_history if "objective/scores" in row
    ]
    assert sum(scores[-5:]) > sum(scores[:5])


def test_a_sync_that_is_skipped_is_caught(begun, shared, tmp_path, monkeypatch):
    made = trainer(shared, tmp_path, updates=4, engine=begun.engine.rollout_engine)
    service = made.engine.rollout_engine.service
    load = service.load

    def skip_the_third(weights, version):
        if version == 2:  # the engine believes it, too
            if hasattr(service, "_llm"):
                service.finish_load(2)
            else:
                service._post("/update_weight_version", json={"new_version": "2"})
        else:
            load(weights, version)

    monkeypatch.setattr(service, "load", skip_the_third)
    with pytest.raises(SyncError, match="loading version 2 had no effect"):
        made.train()
    assert made.engine.step == 2


def test_two_servers_share_the_rows_of_a_batch(shared, tmp_path, close):
    made = trainer(shared, tmp_path, updates=2, rollout_engine="vllm_server", vllm_num_engines=2)
    close(made)
    made.train()
    one, two = made.engine.rollout_engine.engines
    assert one.service.process.pid != two.service.process.pid
    assert one.service.version() == two.service.version() == 2
    gap, kl = agreement(made)
    assert max(gap, kl) <= 1e-4


def test_a_server_that_runs_is_attached_to_and_left_running(shared, tmp_path, close):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = shared / "data" / "stories-head32"
    flags = ["--enable-scale-out", "--logprobs-mode=processed_logprobs", "--dtype=float32"]
    flags += ["--enforce-eager", "--generation-config=vllm", f"--kv-cache-memory-bytes={2**28}"]
    where = ["--model", str(place), "--host", "127.0.0.1", f"--port={port}"]
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    running = Process([*module, *where, *flags], log=tmp_path / "log", eager=True)
    running.start()
    try:
        url = f"http://127.0.0.1:{port}"
        outside = Server(url)
        until = time.monotonic() + 120
        while not outside.healthy() and running.alive and time.monotonic() < until:
            time.sleep(0.2)
        made = trainer(shared, tmp_path / "run", updates=3, rollout_engine=url)
        made.train()
        gap, kl = agreement(made)
        assert max(gap, kl) <= 1e-4
        made.engine.rollout_engine.close()
        assert outside.version() == 3
        outside.close()
    finally:
        running.stop()


def test_a_server_that_does_not_start_says_why(shared, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)vLLM server exited.*no_such_dtype"):
        trainer(
            shared,
            tmp_path,
            rollout_engine="vllm_server",
            vllm_engine_args={"dtype": "no_such_dtype"},
        )


def test_no_server_at_the_url_is_one_clear_error(shared, tmp_path):
    with pytest.raises(ConfigError, match=r"no vLLM server responds at http://127.0.0.1:9;"):
        trainer(shared, tmp_path, rollout_engine="http://127.0.0.1:9")
