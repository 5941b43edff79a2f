"""PPO with a server that a user started: what goes wrong on the way is sent again, or named."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.ext.vllm.server import LostServerError, Server
from kedge.ext.vllm.weights import WeightFiles
from kedge.records.errors import RolloutError
from kedge.testing import tiny_policy
from tests.contract.stand_in import StandIn
from tests.e2e.small import VOCAB, rows, small
from tests.unit.text_toys import EOS


@pytest.fixture
def server():
    server = StandIn(policy())
    yield server
    server.close()


def policy():
    return tiny_policy("gpt_neox", vocab_size=VOCAB, eos_token_id=EOS).eval()


def train(server, folder, **options):
    """Scores of two iterations with the server."""
    trainer = small(
        output_dir=folder,
        model=copy.deepcopy(server.model).train(),
        temperature=1.0,
        stop_token=None,
        **{
            "rollout_engine": server.url,
            "worker_heartbeat": 0.1,
            "worker_timeout": 60.0,
            "preflight": False,
            **options,
        },
    )
    try:
        trainer.train()
        return [row["objective/scores"] for row in rows(trainer)]
    finally:
        trainer.engine.rollout_engine.close()


def test_an_overloaded_server_is_asked_again(server, tmp_path):
    undisturbed = train(server, tmp_path / "a")
    posts, server.posts = server.posts, 0
    server.version = "0"
    server.model = policy()
    server.faults = [(503, "overloaded"), (429, {}), None, (502, "<html>bad gateway</html>")]
    server.busy = {"/collective_rpc", "/pause", "/weight_info", "/v1/models", "/reset_prefix_cache"}
    assert train(server, tmp_path / "b") == undisturbed
    assert not server.busy
    assert server.posts == posts + 3


def change(**fields):
    return lambda choice: choice.update(fields)


FAULTS = {
    "HTML with status 200": ((200, "<html>proxy</html>"), "is not what vLLM returns"),
    "an empty object": ((200, {}), r"KeyError: 'choices'.*proxy"),
    "too few log-probabilities": (
        lambda choice: choice["logprobs"]["content"].pop(),
        r"6 tokens, 5 logprobs",
    ),
    "a token of another vocabulary": (
        change(token_ids=[1, 2, 99_999, 1, 2, 3]),
        r"token ids from 1 to 99999, but the policy has 32 tokens",
    ),
    "no choice": ((200, {"choices": [[]]}), "is not what vLLM returns"),
    "5,000 brackets": ((200, "[" * 5000), "is not what vLLM returns"),
    "a token of no vocabulary": (change(token_ids=[1, 2, 10**30, 1, 2, 3]), "Overflow|too large"),
    "half a token": (change(token_ids=[1, 2, 1.5, 1, 2, 3]), r"token_ids \[1, 2, 1.5"),
    "overloaded for ever": ([(503, "overloaded")] * 99, "failed at /inference/v1/generate: over"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_answer_is_named(server, name, tmp_path):
    fault, message = FAULTS[name]
    server.faults = list(fault) if isinstance(fault, list) else [fault]
    with pytest.raises(RolloutError, match=message):
        train(server, tmp_path, worker_timeout=2.0 if isinstance(fault, list) else 60.0)


def test_a_server_that_scores_no_prompts_is_named(server, tmp_path):
    server.scores = False
    with pytest.raises(RolloutError, match=r"KeyError: 'prompt_logprobs'.*proxy"):
        train(server, tmp_path)


def test_a_lost_request_is_found_within_the_timeout(server, tmp_path):
    server.faults = ["lost"]
    begin = time.monotonic()
    with pytest.raises(LostServerError, match=r"has had no requests for \d s .*were lost"):
        train(server, tmp_path, worker_timeout=2.0)
    assert time.monotonic() - begin < 19


def test_folders_of_a_killed_run_are_deleted_by_the_next(tmp_path):
    code = """
        import sys, time
        from kedge.ext.vllm.weights import WeightFolder
        folder = WeightFolder(sys.argv[1])
        print(folder.path, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    from kedge.ext.vllm.weights import WeightFolder

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        left = process.stdout.readline().strip()
        os.utime(left, (0, 0))
        WeightFolder(str(tmp_path)).delete()
        assert os.path.isdir(left)  # its owner is alive
        process.send_signal(signal.SIGKILL)
    WeightFolder(str(tmp_path)).delete()
    assert os.listdir(tmp_path) == []


class Weighed(StandIn):
    """Knows vLLM's routes of adapters, and weighs the files of every sync."""

    def __init__(self, model):
        super().__init__(model)
        self.syncs, self.names = [], []

    def post(self, path, body):
        folder = body.get("lora_path") or body.get("kwargs", {}).get("weights_path")
        if folder is not None:
            files = Path(folder).glob("*.safetensors")
            self.syncs.append((path, sum(file.stat().st_size for file in files)))
        if "lora_name" in body:
            self.names.append((path.split("/")[-1], body["lora_name"]))
            return 200, {}
        return super().post(path, body)


def test_an_adapter_travels_alone(tmp_path):
    """Bytes of a sync over HTTP, of the whole policy and of a LoRA of rank 4 on it."""
    model = tiny_policy("llama", hidden_size=128)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules="all-linear"))
    stand_in = Weighed(copy.deepcopy(model))
    for policy_model, versions in ((model, [1]), (adapted, [2, 3])):
        spec = PolicyTemplate.of(policy_model)
        trains = {n: p.detach() for n, p in policy_model.named_parameters() if p.requires_grad}
        server = Server(stand_in.url, files=WeightFiles(parent=str(tmp_path)))
        for version in versions:
            server.load(spec.payload(trains), version)
        assert server.version() == versions[-1]
        server.close()
    stand_in.close()
    (whole, big), *adapters = stand_in.syncs
    assert whole == "/collective_rpc"
    assert {path for path, _ in adapters} == {"/v1/load_lora_adapter"}
    assert [size / big for _, size in adapters] == [pytest.approx(0.053, abs=1e-3)] * 2
    assert stand_in.names == [
        ("load_lora_adapter", "kedge-1"),
        ("load_lora_adapter", "kedge-2"),
        ("unload_lora_adapter", "kedge-1"),
    ]
