"""Weights on their way to vLLM: a bucket at a time, and what remains if a sync fails."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from kedge.errors import SyncError
from kedge.learner.learner_state import WeightCopier
from kedge.rollout.vllm import Remote
from kedge.rollout.vllm import weights as weight_files
from kedge.rollout.vllm.engine import VLLMEngine
from kedge.rollout.vllm.policy_template import PolicyTemplate
from kedge.rollout.vllm.weights import WeightFiles, WeightPayload
from kedge.types import Sampling
from tests.contract.engines import policy, trained
from tests.contract.test_rollout_engine import prompts
from tests.private_bytes import PrivateBytes
from tests.unit.test_vllm_sync import Sleeper, moved


def test_an_engine_with_half_of_the_weights_does_not_sample():
    model = policy()
    spec, weights = PolicyTemplate.of(model), trained(model)
    service = Sleeper(spec, weights)
    engine = VLLMEngine(service, spec, pad_id=0)
    engine.load_weights(weights, 1)
    load, sampling = service.load, Sampling(max_new_tokens=1)

    def half(payload, version):
        raise SyncError("vLLM rejected the weights of version 2: after a half of them")

    service.load = half
    with pytest.raises(SyncError, match="after a half"):
        engine.load_weights(moved(weights, 1e-2), 2)
    for sample in (
        lambda: engine.generate(prompts(), sampling=sampling, seed=0),
        lambda: engine.submit(prompts(), sampling=sampling, seed=0),
        engine.advance,
    ):
        with pytest.raises(SyncError, match=r"loading version 2 failed.*weights of two versions"):
            sample()
    service.load = load
    engine.load_weights(moved(weights, 1e-2), 2)
    assert engine.generate(prompts(), sampling=sampling, seed=0).version.unique().tolist() == [2]


def test_weights_that_cannot_be_written_leave_the_old_ones(tmp_path, monkeypatch):
    remote = Remote("http://unused", files=WeightFiles(parent=str(tmp_path)))
    spec, weights = PolicyTemplate.of(policy()), trained(policy())
    monkeypatch.setattr(remote, "reload", lambda version: None)
    remote.load(spec.payload(weights), 1)
    monkeypatch.setattr(weight_files, "_save", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(
        SyncError, match=r"weights of 0.00 GB cannot be written.*weight_sync_folder"
    ):
        remote.load(spec.payload(moved(weights, 0.1)), 2)
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    assert folder == remote._folder.path  # loaded again if the server is restarted
    assert set(load_file(folder / "model.safetensors")) == set(weights)
    remote.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("servers", [1, 4, 16])
def test_servers_of_a_machine_read_the_same_files(servers, tmp_path, monkeypatch):
    files = WeightFiles(servers, str(tmp_path))
    remotes = [Remote(f"http://unused{i}", files=files) for i in range(servers)]
    spec = PolicyTemplate.of(policy())
    for version in (1, 2):
        payload = spec.payload(moved(trained(policy()), 0.1 * version))
        for remote in remotes:
            monkeypatch.setattr(remote, "reload", lambda version: None)
            remote.load(payload, version)
        (folder,) = tmp_path.iterdir()  # the old ones are gone
        assert {remote._folder.path for remote in remotes} == {folder}
    for remote in remotes:
        remote.close()
    assert list(tmp_path.iterdir()) == []


def test_weights_are_written_and_converted_a_bucket_at_a_time(tmp_path, monkeypatch):
    bucket, width = 1 << 14, 1 << 10
    monkeypatch.setattr(weight_files, "BUCKET", bucket)
    named = tuple((f"w{i}", torch.full((width,), float(i))) for i in range(64))
    payload = weight_files.WeightPayload(named, dtype=torch.bfloat16)
    with PrivateBytes() as held:
        payload.write(tmp_path)
    assert held.most <= bucket + 2 * width < 2 * width * 64 / 4
    found = {}
    for file in sorted(tmp_path.iterdir()):
        assert file.stat().st_size < bucket + 2000
        found |= load_file(file)
    assert all(torch.equal(found[name], x.bfloat16()) for name, x in named)
    with PrivateBytes() as held:
        for _ in payload.tensors():
            pass
    assert held.most <= 2 * 2 * width


def test_a_synchronous_run_sends_the_learners_tensors_themselves():
    model = policy()
    live = WeightCopier(live=True, dtype=torch.bfloat16)(model)
    assert {x.data_ptr() for x in live.values()} == {p.data_ptr() for p in model.parameters()}
    copied = WeightCopier(dtype=torch.bfloat16)(model)
    spec = PolicyTemplate.of(model, dtype=torch.bfloat16)
    first, second = spec.expected(live), spec.expected(copied)
    assert torch.equal(first.logprobs, second.logprobs)
    assert torch.equal(first.rounded, second.rounded)
    assert first.fingerprint == second.fingerprint


def test_adapters_are_written_whatever_their_memory_layout(tmp_path):
    a, b = torch.randn(6, 4).T, torch.randn(6, 4)  # the first is not contiguous
    named = (("lora_A.weight", a), ("lora_B.weight", b))
    WeightPayload(named, LoraConfig(r=4, target_modules=["q_proj"])).write(tmp_path)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: x.tolist() for name, x in found.items()} == {n: x.tolist() for n, x in named}


def test_the_same_tensors_in_a_later_sync_are_written_again(tmp_path):
    weight = torch.zeros(2)
    files = WeightFiles(2, str(tmp_path))

    def store(weights):
        return files.store(WeightPayload(tuple(weights.items()), weights=weights))

    store({"w": weight})  # the second server fails before it
    weight += 1
    later = {"w": weight}
    found = [store(later) for _ in range(2)]
    assert found[0] is found[1]
    assert load_file(found[0].path / "model.safetensors")["w"].tolist() == [1.0, 1.0]
