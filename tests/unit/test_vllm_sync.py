"""Weights for vLLM without vLLM: policy specs, payloads, verified syncs, a bucket at a time."""

from __future__ import annotations

import itertools
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch.func import functional_call
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.background import Stopped, stopped_by
from kedge.ext.vllm import Server
from kedge.ext.vllm import weights as weight_module
from kedge.ext.vllm.engine import VLLMEngine
from kedge.ext.vllm.policy_template import PolicyTemplate, weights_dtype
from kedge.ext.vllm.requests import GenerationResult
from kedge.ext.vllm.weights import WeightFiles, WeightPayload, max_lora_rank
from kedge.learner.learner_state import WeightCopier
from kedge.models.fingerprint import fingerprint
from kedge.records.errors import RolloutError, SyncError
from kedge.records.types import Sampling
from kedge.testing import tiny_policy
from tests.contract.embedded import prompts
from tests.contract.engines import policy, trained
from tests.storages import PrivateBytes

FAMILIES = ["llama", "gpt2", "gpt_neox", "qwen2"]


def result(version, prompt_logprobs=()):
    return GenerationResult(
        tokens=np.array([1]),
        logprobs=np.array([-1.0]),
        stopped=False,
        versions=[(version, 1)],
        prompt_logprobs=prompt_logprobs,
    )


class Ours:
    """A service that computes with the learner's own code; ``broken`` says how it goes wrong."""

    def __init__(self, spec, weights, broken=""):
        self.spec, self.broken = spec, broken
        self.weights, self.said = weights, 0
        self.queued = weights  # of the sync before

    def serve(self, new):
        return {key: self.answer(request) for key, request in new.items()}

    def answer(self, request):
        row = self.spec.probe().tolist().index(request.prompt)
        assert request.params["prompt_logprobs"] == 0
        return result(self.said, tuple(self.logprobs()[row].tolist()))

    def logprobs(self):
        return self.spec.logprobs(self.weights)

    def load(self, payload, version):
        sent = {name: x for name, x in payload.named if name in self.weights}
        self.said = version - (self.broken == "version")
        if self.broken == "one weight" and self.said > 1:
            sent["model.norm.weight"] = self.weights["model.norm.weight"]
        if self.broken == "swapped" and self.said > 1:
            first, second = self.swapped
            sent[first], sent[second] = sent[second], sent[first]
        if self.broken == "late":
            sent, self.queued = self.queued, sent
        if self.broken != "skips" or self.said < 2:
            self.weights = sent

    def version(self):
        return self.said

    def max_length(self):
        return 64


def engine_of(kind=None, **options):
    """An engine over a service of this file, and the weights that it has."""
    model = policy()
    spec, weights = PolicyTemplate.of(model), trained(model)
    return VLLMEngine((kind or Ours)(spec, weights), spec, pad_id=0, **options), weights


def moved(weights, by):
    generator = torch.Generator().manual_seed(1)
    noise = {n: torch.randn(p.shape, generator=generator) for n, p in weights.items()}
    return {n: p + by * noise[n] for n, p in weights.items()}


def receipts(broken, by=1e-2):
    engine, first = engine_of(lambda *about: Ours(*about, broken))
    second = moved(first, by)
    assert engine.load_weights(first, 1).fingerprint == fingerprint(first)
    return engine.load_weights(second, 2), fingerprint(second)


def test_a_receipt_is_for_what_the_engine_computes():
    receipt, want = receipts("")
    assert (receipt.version, receipt.fingerprint) == (2, want)


@pytest.mark.parametrize(
    ("broken", "by", "message"),
    [
        ("skips", 1e-2, "had no effect"),
        ("skips", 1e-5, "had no effect"),  # however small the update
        ("one weight", 0.1, "differ by"),
        ("version", 1e-2, "reports version 0 after being sent 1"),
    ],
)
def test_what_vllm_does_not_compute_with_is_an_error(broken, by, message):
    with pytest.raises(SyncError, match=message):
        receipts(broken, by)


def test_the_probe_says_what_the_model_says():
    for model in (policy(), tiny_policy("gpt2"), policy("qwen2", tie_word_embeddings=True)):
        spec = PolicyTemplate.of(model)
        probe = spec.probe()
        logits = model.eval()(probe).logits[:, :-1].log_softmax(-1)
        want = logits.gather(-1, probe[:, 1:, None])[..., 0]
        torch.testing.assert_close(spec.logprobs(trained(model)), want.detach())


def test_a_tied_head_is_sent_as_a_weight_of_its_own():
    model = policy("qwen2", tie_word_embeddings=True)
    spec = PolicyTemplate.of(model)
    named = dict(spec.payload(trained(model)).named)
    assert torch.equal(named["lm_head.weight"], named["model.embed_tokens.weight"])
    assert set(named) == set(model.state_dict())
    assert spec.config.tie_word_embeddings is False
    assert model.config.tie_word_embeddings is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {}, "received no weights"),
        (
            lambda w: w | {"more": torch.zeros(1)},
            "'more', which the rollout engine's model does not",
        ),
        (lambda w: w | {"lm_head.weight": torch.zeros(3, 3)}, r"lm_head.weight is \(3, 3\)"),
        (
            lambda w: {k: v for k, v in w.items() if "norm" not in k},
            "trained weight 'model.layers.0.inp",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message):
    model = policy()
    with pytest.raises(SyncError, match=message):
        PolicyTemplate.of(model).payload(change(trained(model)))


def test_a_folder_is_a_checkpoint_without_end_of_text(tmp_path):
    from transformers import AutoModelForCausalLM

    model = policy("qwen2", tie_word_embeddings=True)
    PolicyTemplate.of(model).write(tmp_path, trained(model))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert again.config.eos_token_id is None
    assert again.config.architectures == ["Qwen2ForCausalLM"]


def test_a_spec_can_be_sent_to_another_process():
    model = policy("qwen2", tie_word_embeddings=True)
    sent = pickle.loads(pickle.dumps(PolicyTemplate.of(model)))
    assert all(p.is_meta for p in sent.meta_model.parameters())
    weights = trained(model)
    want = PolicyTemplate.of(model).on_cpu().logprobs(weights)
    assert torch.equal(sent.logprobs(weights), want)
    assert [n for n, _ in sent.payload(weights).named].count("lm_head.weight") == 1


def test_an_adapter_is_a_separate_payload(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    about = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = get_peft_model(policy(), LoraConfig(**about)).eval()
    spec = PolicyTemplate.of(model)
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    spec.write(tmp_path / "base", weights)
    spec.payload(weights).write(tmp_path / "adapter")
    assert max_lora_rank(spec.adapter) == 8
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = spec.probe()
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    want = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(spec.logprobs(weights), want.detach())


class Sleeper(Ours):
    """Records when it sleeps and wakes, and samples nothing."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def sleep(self):
        self.calls.append("sleep")

    def wake(self, part):
        self.calls.append(f"wake {part}")

    def load(self, payload, version):
        self.calls.append("load")
        super().load(payload, version)

    def answer(self, request):
        scores = "prompt_logprobs" in request.params
        self.calls.append("score" if scores else "generate")
        return super().answer(request) if scores else result(self.said)


def test_memory_is_freed_after_sampling_and_the_cache_comes_back_after_the_weights():
    engine, weights = engine_of(Sleeper, sleeps=True)
    sampling = Sampling(max_new_tokens=1)
    for version in (1, 2):
        engine.load_weights(moved(weights, 0.1 * version), version)
        engine.generate(prompts(), sampling=sampling, seed=0)
    engine.generate(prompts(), sampling=sampling, seed=0)  # without a weight sync
    first = ["load", "score", "generate", "sleep"]
    second = ["wake weights", "load", "wake kv_cache", "score", "generate", "sleep"]
    third = ["wake weights", "wake kv_cache", "generate", "sleep"]
    assert [call for call, _ in itertools.groupby(engine.service.calls)] == first + second + third


def test_a_response_that_vllm_would_cut_is_refused():
    engine, _ = engine_of(Sleeper)
    engine.max_length = 8
    longest = int(prompts().mask.sum(-1).max())
    engine.generate(prompts(), sampling=Sampling(max_new_tokens=8 - longest), seed=0)
    with pytest.raises(RolloutError, match=r"need 9 tokens, but .* max_model_len=8 "):
        engine.generate(prompts(), sampling=Sampling(max_new_tokens=9 - longest), seed=0)


def test_a_thread_that_is_stopped_aborts_its_requests():
    model, cancelled, event = policy(), [], threading.Event()
    spec = PolicyTemplate.of(model)
    engine = VLLMEngine(Sleeper(spec, trained(model)), spec, pad_id=0)
    engine.service.cancel = lambda: cancelled.append(1)
    with stopped_by(event):
        engine.generate(prompts(), sampling=Sampling(max_new_tokens=4), seed=0)
        event.set()
        with pytest.raises(Stopped):
            engine.generate(prompts(), sampling=Sampling(max_new_tokens=4), seed=0)
    assert cancelled == [1]
    engine.generate(prompts(), sampling=Sampling(max_new_tokens=4), seed=0)


def test_weights_are_sent_in_the_dtype_of_the_rollout_engine(tmp_path):
    model = policy("qwen2", tie_word_embeddings=True)
    spec = PolicyTemplate.of(model, dtype="bfloat16")
    weights = trained(model)
    payload = spec.payload(weights)
    assert all(x.dtype == torch.float32 for _, x in payload.named)  # the learner's, not copied
    assert dict(payload.named)["model.norm.weight"].data_ptr() == (
        weights["model.norm.weight"].data_ptr()
    )
    assert {x.dtype for _, x in payload.tensors()} == {torch.bfloat16}
    spec.write(tmp_path, weights)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["model.norm.weight"], weights["model.norm.weight"].bfloat16())
    assert PolicyTemplate.of(model, dtype="auto").dtype is None


def test_a_base_in_bfloat16_is_sampled_in_bfloat16():
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=4, target_modules=["q_proj"])
    assert weights_dtype(get_peft_model(policy().bfloat16(), adapter)) == torch.bfloat16
    assert weights_dtype(policy()) == torch.float32


def test_samples_of_other_weights_than_those_that_were_sent_are_an_error():
    engine, weights = engine_of(Sleeper)
    engine.load_weights(weights, 4)
    engine.service.said = -1  # the name that another client has given them
    with pytest.raises(SyncError, match="sampled with version -1 instead of 4"):
        engine.generate(prompts(), sampling=Sampling(max_new_tokens=1), seed=0)


class Rounded(Ours):
    """Computes in bfloat16 with weights in bfloat16, as vLLM does; may lose the second sync."""

    def logprobs(self):
        weights = {name: p.bfloat16() for name, p in self.weights.items()}
        with torch.no_grad():
            ids = {"input_ids": self.spec.probe()}
            logits = functional_call(self.spec.meta_model, weights, kwargs=ids).logits
        logp = logits[:, :-1].float().log_softmax(-1)
        return logp.gather(-1, ids["input_ids"][:, 1:, None])[..., 0]


def low_precision(broken="", **shape):
    model = policy(**shape)
    spec = PolicyTemplate.of(model, dtype=torch.bfloat16)
    weights = trained(model)
    return VLLMEngine(Rounded(spec, weights, broken), spec, pad_id=0), weights


@pytest.mark.parametrize("family", FAMILIES)
def test_honest_syncs_in_bfloat16_are_accepted(family):
    engine, weights = low_precision(family=family)
    for version in range(1, 51):
        receipt = engine.load_weights(weights, version)
        weights = moved(weights, 1e-5)
    assert receipt.gap > 1e-3  # the rounding hides what one update changes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("broken", ["skips", "late"])
def test_a_sync_that_is_lost_or_late_in_bfloat16_is_found_at_the_first_update(family, broken):
    engine, weights = low_precision(broken, family=family)
    engine.load_weights(weights, 1)  # the engine already has them
    with pytest.raises(SyncError, match="loading version 2 had no effect"):
        engine.load_weights(moved(weights, 1e-4), 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_weights_in_bfloat16_are_found_at_the_first_update(family):
    engine, weights = low_precision("swapped", family=family)
    engine.load_weights(weights, 1)
    pairs = [
        (a, b)
        for a in weights
        for b in weights
        if a < b and weights[a].dim() == 2 and weights[a].shape == weights[b].shape
    ]
    assert len(pairs) >= 6
    for engine.service.swapped in pairs:
        with pytest.raises(SyncError, match="differ by"):
            engine.load_weights(moved(weights, 1e-4), 2)


def test_a_deep_model_may_differ_by_its_own_rounding():
    shape = {"layers": 28, "hidden_size": 128, "heads": 4, "initializer_range": 0.15}
    engine, weights = low_precision(**shape)
    assert engine.load_weights(weights, 1).gap > 0.05  # more than the limit of a shallow model
    wrong = {"model.norm.weight": 1.5 * weights["model.norm.weight"]}

    def load(payload, version):
        engine.service.weights, engine.service.said = weights | wrong, version

    engine.service.load = load
    with pytest.raises(SyncError, match="differ by"):
        engine.load_weights(moved(weights, 1e-5), 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_the_learner_rounded_are_verified_as_exactly(family, monkeypatch):
    """Computed in float32, one layer at a time, as from a float32 copy of the rounded weights."""
    model = policy(family=family)
    spec = PolicyTemplate.of(model, dtype=torch.bfloat16)
    copied = WeightCopier(dtype=torch.bfloat16)(model.requires_grad_(True))
    widened = {name: x.float() for name, x in copied.items()}
    wide = Live(monkeypatch)
    found = spec.expected(copied)
    assert found.fingerprint == fingerprint(trained(model))
    assert torch.equal(found.logprobs, spec.logprobs(widened))
    assert torch.equal(found.rounded, spec.logprobs(widened, autocast=torch.bfloat16))
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    one_layer = sum(p.numel() for p in layers[0].parameters())
    rest = sum(x.numel() for x in copied.values()) - len(layers) * one_layer
    assert wide.most <= rest + one_layer < rest + len(layers) * one_layer
    engine = VLLMEngine(Rounded(spec, copied), spec, pad_id=0)
    assert engine.load_weights(copied, 1).fingerprint == found.fingerprint


class Live:
    """Counts the numbers in float32 copies of bfloat16 weights that exist at a time."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        to = torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: self.note(x, to(x, *a, **k)))

    def note(self, x, copied):
        is_weight = x.dim() <= 2  # queries and keys have more dimensions
        if is_weight and x.dtype == torch.bfloat16 and copied.dtype == torch.float32:
            self.now += copied.numel()
            self.most = max(self.most, self.now)
            weakref.finalize(copied.untyped_storage(), self.free, copied.numel())
        return copied

    def free(self, count):
        self.now -= count


def test_an_engine_with_half_of_the_weights_does_not_sample():
    engine, weights = engine_of(Sleeper)
    service = engine.service
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
    rollout = engine.generate(prompts(), sampling=sampling, seed=0)
    assert rollout.policy_version.unique().tolist() == [2]


def test_weights_that_cannot_be_written_leave_the_old_ones(tmp_path, monkeypatch):
    remote = Server("http://unused", files=WeightFiles(parent=str(tmp_path)))
    spec, weights = PolicyTemplate.of(policy()), trained(policy())
    monkeypatch.setattr(remote, "reload", lambda version: None)
    remote.load(spec.payload(weights), 1)
    monkeypatch.setattr(weight_module, "_save", lambda *_: (_ for _ in ()).throw(OSError("full")))
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
    remotes = [Server(f"http://unused{i}", files=files) for i in range(servers)]
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
    monkeypatch.setattr(weight_module, "BUCKET", bucket)
    named = tuple((f"w{i}", torch.full((width,), float(i))) for i in range(64))
    payload = weight_module.WeightPayload(named, dtype=torch.bfloat16)
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


def test_requests_that_vllm_has_lost_are_an_error():
    """Asking again would spin at a full core for ever."""
    engine, _ = engine_of()
    engine.service.serve, engine.service.holds_requests = (lambda new: {}), False
    with pytest.raises(RolloutError, match="vLLM has lost 6 of 6 requests"):
        engine.generate(prompts(), sampling=Sampling(max_new_tokens=3), seed=0)
