"""Options of vLLM and requests to it, without vLLM."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import replace
from textwrap import dedent

import httpx
import numpy as np
import pytest
import torch

from kedge import PPOConfig
from kedge.config import rollout_engines
from kedge.ext.vllm.build import check_local, gpus_of_servers
from kedge.ext.vllm.inprocess import _rank_args, device_args
from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.ext.vllm.requests import (
    GenerationResult,
    allowed_tokens,
    build_requests,
    build_sampling_params,
    check_version,
    read_responses,
    row_seed,
)
from kedge.ext.vllm.server import Process, Server, find_version, flags
from kedge.records.errors import ConfigError, RolloutError
from kedge.records.types import Sampling
from kedge.rollout.engines import build_rollout
from kedge.testing import tiny_policy
from tests.contract.embedded import prompts
from tests.contract.engines import policy, trained

IN_FLIGHT = {
    **{"rollout_engine": "vllm", "rollout_schedule": "as_completed"},
    "in_flight_weight_updates": True,
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_sleep": True}, "vllm_sleep=True has no effect with rollout_engine='embedded'"),
        (
            {"rollout_engine": "vllm", "vllm_engine_args": {"seed": 1}},
            "vllm_engine_args must not set seed",
        ),
        (
            {"rollout_engine": "vllm", "vllm_engine_args": "no json"},
            "vllm_engine_args='no json' must be a dictionary, a JSON object or None, but is not",
        ),
        ({"rollout_engine": "vllm", "vllm_tolerance": 0.0}, "vllm_tolerance=0.0 must be above 0"),
        (IN_FLIGHT | {"vllm_engine_args": {"async_scheduling": True}}, "async_scheduling=True"),
        # vLLM would decide, and switch it on
        (IN_FLIGHT | {"vllm_engine_args": '{"async_scheduling": null}'}, "async_scheduling=None"),
    ],
)
def test_options_that_cannot_work(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(rollout_engines, "installed", lambda name: True)
    with pytest.raises(ConfigError, match=message):
        PPOConfig(output_dir=str(tmp_path), **options)


def test_vllm_that_is_not_installed_is_an_error_before_anything_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_engines, "installed", lambda name: False)
    with pytest.raises(ConfigError, match="needs vLLM in this environment: pip install"):
        PPOConfig(output_dir=str(tmp_path), rollout_engine="vllm")


def trainer_of(tmp_path, monkeypatch, model, **options):
    from kedge import PPOTrainer
    from tests.unit.text_toys import word_tokenizer

    monkeypatch.setattr(rollout_engines, "installed", lambda name: True)
    return PPOTrainer(
        args=PPOConfig(output_dir=str(tmp_path), total_episodes=8, **options),
        processing_class=word_tokenizer(),
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=[{"prompt": "a b"}] * 8,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "attention heads of size 8, but vLLM on CPUs supports only 32, 64"),
        ({"vllm_sleep": True, "heads": 1}, "vllm_sleep=True needs a GPU"),
        (
            {"vllm_engine_args": {"max_model_len": 4}, "heads": 1},
            r"need 55 positions; vLLM with max_model_len \(vllm_engine_args\) has 4",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="about CPUs")
def test_what_vllm_cannot_do_is_refused_before_it_starts(tmp_path, monkeypatch, options, message):
    options = {"rollout_engine": "vllm"} | options
    model = tiny_policy("llama", heads=options.pop("heads", 4))
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, monkeypatch, model, **options)


def test_engine_arguments_as_flags():
    switches = {"enforce_eager": True, "enable_lora": False}
    found = flags({"max_model_len": 9} | switches | {"hf_overrides": {"a": [1]}, "revision": None})
    assert found[:3] == ["--max-model-len=9", "--enforce-eager", "--no-enable-lora"]
    assert found[3:] == ['--hf-overrides={"a": [1]}']


@pytest.mark.parametrize(
    ("gpus", "visible", "learners", "asked", "want"),
    [
        (0, None, 1, (2, 1), [None, None]),
        (1, None, 1, (1, 1), [None]),
        (4, None, 1, (2, 1), ["1", "2"]),
        (4, None, 2, (1, 2), ["2,3"]),
        (4, "3,5,6,7", 1, (3, 1), ["5", "6", "7"]),
        (2, None, 1, (2, 1), "need 3 GPUs, got 2"),
    ],
)
def test_servers_get_the_gpus_that_no_learner_has(
    gpus, visible, learners, asked, want, monkeypatch
):
    """``asked``: servers, and GPUs of each."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(learners))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    refused = isinstance(want, str)
    with pytest.raises(ConfigError, match=want) if refused else contextlib.nullcontext():
        assert gpus_of_servers(*asked) == want


def test_nccl_without_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(rollout_engines, "installed", lambda name: True)
    asked = {"output_dir": "unused", "rollout_engine": "ray", "vllm_transfer": "nccl"}
    args, sampling = PPOConfig(**asked), Sampling(max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"vllm_transfer='nccl' needs a GPU"):
        check_local(policy(), sampling, args)
    with pytest.raises(ConfigError, match="vllm_transfer='nccl' has no effect with"):
        PPOConfig(**asked | {"rollout_engine": "vllm_server"})


def test_a_vllm_that_is_too_old_or_missing_is_one_clear_error(tmp_path):
    check_version("0.32.0rc1+cpu", "here")
    with pytest.raises(ConfigError, match=r"^here has version 0.31.9, but Kedge needs vLLM 0.32"):
        check_version("0.31.9", "here")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.20.1\n")
    python.chmod(0o755)
    model = policy()
    with pytest.raises(ConfigError, match=r"vLLM of .*python has version 0.20.1, but"):
        Server.start(PolicyTemplate.of(model), trained(model), python=str(python))
    python.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match=r"vllm_python=.* has no vLLM: install vllm"):
        find_version(str(python))
    with pytest.raises(ConfigError, match="cannot be run"):
        find_version(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("version", "status", "missing"),
    [
        ("0.31.0", 400, "has version 0.31.0, but Kedge needs vLLM 0.32"),
        ("0.32.0", 400, None),
        ("0.32.0", 403, "must be started with --enable-scale-out;"),
    ],
)
def test_a_server_without_tokens_in_and_out_is_refused(version, status, missing):
    model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"}

    def respond(request):
        if request.url.path == "/inference/v1/generate":
            return httpx.Response(status)
        found = {"version": version, "vllm_config": {"model_config": model}}
        return httpx.Response(200, json=found)

    server = Server("http://vllm")
    server._client = httpx.Client(base_url=server.url, transport=httpx.MockTransport(respond))
    refused = pytest.raises(ConfigError, match=missing)
    with refused if missing else contextlib.nullcontext():
        server.check(tied=False, precision="float32")
    server.close()


def test_a_vllm_on_the_learners_gpu_leaves_it_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = [device_args(shares_gpu=x).get("gpu_memory_utilization") for x in (True, False)]
    assert found == [0.3, None]


def test_ranks_that_cannot_have_a_vllm_each(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert _rank_args(1) == {"distributed_executor_backend": "external_launcher"}
    with pytest.raises(ConfigError, match=r"vllm_tensor_parallel_size=2 .* 2 ranks.*set it to 1"):
        _rank_args(2)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="accelerate launch or torchrun, which sets LOCAL_RANK"):
        _rank_args(1)


def test_a_server_whose_guard_was_killed_is_stopped_with_the_run(tmp_path):
    psutil = pytest.importorskip("psutil")
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = Process(sleep, log=tmp_path / "log", eager=False)
    process.start()
    guard = psutil.Process(process.pid)
    while not guard.children():
        time.sleep(0.05)
    (server,) = guard.children()
    guard.kill()
    while process.alive:
        time.sleep(0.05)
    assert server.is_running()
    process.stop()
    assert psutil.wait_procs([server], timeout=10)[1] == []


@pytest.mark.parametrize("crashes", [False, True])
def test_processes_of_a_server_have_time_to_release_shared_memory(tmp_path, crashes):
    """The server ends its worker and exits; the worker unlinks 0.5 s later, as vLLM's do."""
    worker = """
        import signal, sys, time
        from pathlib import Path
        memory = Path(sys.argv[1])
        def end(*_):
            time.sleep(0.5)
            memory.unlink()
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        memory.touch()
        time.sleep(600)
    """
    server = """
        import signal, subprocess, sys, time
        worker = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
        def end(*_):
            worker.terminate()
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        time.sleep(600)
    """
    psutil, memory = pytest.importorskip("psutil"), tmp_path / "psm"
    words = [sys.executable, "-c", dedent(server), dedent(worker), str(memory)]
    process = Process(words, log=tmp_path / "log", eager=False)
    process.start()
    while not memory.exists():
        time.sleep(0.05)
    if crashes:
        psutil.Process(process.pid).children()[0].kill()
    process.stop()
    assert not memory.exists()
    assert not process.alive


def test_every_row_has_a_seed_of_its_own():
    seeds = {row_seed(seed, row) for seed in range(-20, 20) for row in range(100)}
    assert len(seeds) == 4000
    assert all(0 <= s < 2**56 for s in seeds)
    asks = build_requests(prompts(), Sampling(max_new_tokens=3), 5, vocabulary=64)
    assert [a.params["seed"] for a in asks] == [row_seed(5, row) for row in range(6)]
    assert asks[1].prompt == prompts().ids[1, 4:].tolist()


def test_temperatures_that_vllm_would_change_are_refused():
    with pytest.raises(
        ConfigError, match=r"temperature=0.001 must be 0 .* or at least 0.01 with vLLM"
    ):
        build_sampling_params(Sampling(max_new_tokens=1, temperature=0.001), vocabulary=64)


def record(answers, sampling, *, tokenizer=None):
    batch = prompts(lengths=(7,) * len(answers))
    responses = read_responses(answers, sampling, tokenizer=tokenizer, vocabulary=64)
    return build_rollout(batch, responses, sampling, pad_id=9, extra_column=False)


def answer(tokens, stopped=False, version=3):
    return GenerationResult(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        stopped=stopped,
        versions=[(version, len(tokens))],
    )


def test_answers_become_a_record():
    found = record([answer([5, 6]), answer([7], stopped=True)], Sampling(max_new_tokens=2))
    assert found.ids.tolist() == [[5, 6], [7, 9]]
    assert found.response_mask.tolist() == [[True, True], [True, False]]
    assert found.terminated.tolist() == [False, True]
    assert found.policy_version.tolist() == [3, 3]
    assert found.behavior_logprobs.tolist() == [[-0.5, -0.5], [-0.5, 0.0]]


def test_a_stop_string_ends_a_response_where_it_is_complete():
    class Letters:
        def decode(self, ids, **_):
            return "".join(chr(97 + i) for i in ids)

    stops = Sampling(max_new_tokens=5, stop_strings=("cd",))
    late = answer([0, 2, 3, 1], stopped=True)  # vLLM noticed one token late
    found = record([late, answer([2, 2, 2, 2, 2])], stops, tokenizer=Letters())
    assert found.response_mask.sum(1).tolist() == [3, 5]
    assert found.terminated.tolist() == [True, False]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (answer([]), "responses of 0 to 1 tokens"),
        (answer([1, 2, 3]), "responses of 1 to 3 tokens"),
        (
            replace(answer([1], version=4), logprobs=np.array([math.nan], np.float32)),
            "NaN or infinite log-probabilities for row 1, sampled by version 4",
        ),
    ],
)
def test_a_result_that_cannot_be_right_is_an_error(bad, message):
    with pytest.raises(RolloutError, match=message):
        record([answer([1]), bad], Sampling(max_new_tokens=2))


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        ({}, 0),
        ({"top_k": 5}, 19),  # with ties
        ({"top_k": 500}, 64),  # the whole vocabulary
        ({"top_p": 0.9}, 64),
        ({"top_p": 0.9, "temperature": 0.0}, 0),  # greedy
    ],
)
def test_as_many_log_probabilities_are_requested_as_tokens_can_be_allowed(sampling, want):
    params = build_sampling_params(Sampling(max_new_tokens=1, **sampling), vocabulary=64)
    assert params["logprobs"] == want


def test_allowed_tokens_are_those_of_positive_probability():
    half = math.log(0.5)
    assert allowed_tokens([(7, half), (3, half), (7, half), (9, -math.inf)]) == [7, 3]
    assert allowed_tokens([(7, 0.0), (9, -9999.0)]) == [7]  # -inf over HTTP
    with pytest.raises(RolloutError, match=r"than the 2 .* probability 0.75: .*set top_k, or a"):
        allowed_tokens([(7, half), (3, math.log(0.25))])


def test_a_rollout_records_what_could_be_sampled():
    results = [
        replace(answer([5, 6]), allowed=np.array([[5, 1, 2], [6, -1, -1]])),
        replace(answer([7], stopped=True), allowed=np.array([[8, 7]])),
    ]
    rollout = record(results, Sampling(max_new_tokens=2, top_p=0.9))
    none = [-1, -1, -1]
    assert rollout.allowed_tokens.tolist() == [[[5, 1, 2], [6, -1, -1]], [[8, 7, -1], none]]
    assert record(results, Sampling(max_new_tokens=2)).allowed_tokens is None
    greedy = record([answer([5, 6])], Sampling(max_new_tokens=2, top_k=3, temperature=0.0))
    assert greedy.allowed_tokens.tolist() == [[[5], [6]]]
