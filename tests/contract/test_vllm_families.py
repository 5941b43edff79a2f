"""Kinds of policies that need care with vLLM: tied heads, transformers' own code, adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch

from kedge.records.errors import ConfigError, SyncError
from kedge.records.types import Sampling
from kedge.rollout.embedded.sampling import restrict
from tests.contract.embedded import prompts
from tests.contract.engines import PAD, needs_vllm, policy, server_of, trained

pytestmark = needs_vllm
SAMPLING = Sampling(max_new_tokens=12, min_new_tokens=3, temperature=0.7, stop_ids=(5,))
# The initial weights are larger than usual, so that wrong ones show.
KINDS = {
    "own head": ("llama", {}),
    "tied head": ("qwen2", {"tie_word_embeddings": True}),
    "absolute positions, tied head": ("gpt2", {}),
    "run by transformers' code": ("gpt_neox", {}),
}


def engine_for(model, **options):
    from kedge.ext.vllm import InProcess, PolicyTemplate, VLLMEngine

    spec = PolicyTemplate.of(model)
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    service = InProcess(spec, weights, {"kv_cache_memory_bytes": 2**26, **options})
    return VLLMEngine(service, spec, pad_id=PAD)


def shaken(model, by=0.05):
    """The model's weights after a step of random size, in the model, too."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn(p.shape, generator=generator))
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def learner_says(model, rollout):
    """Log-probabilities of the sampled tokens at the sampling temperature: float [B, R]."""
    out = torch.zeros(rollout.ids.shape)
    for i, length in enumerate(rollout.response_mask.sum(1).tolist()):
        prompt = rollout.prompts.ids[i][rollout.prompts.mask[i]]
        ids = torch.cat([prompt, rollout.ids[i, :length]])
        with torch.no_grad():
            logits = model.eval()(ids[None]).logits[0, len(prompt) - 1 : -1].clone()
        logits[: SAMPLING.min_new_tokens, list(SAMPLING.stop_ids)] = -torch.inf
        logp = (logits / SAMPLING.temperature).log_softmax(-1)
        out[i, :length] = logp.gather(-1, rollout.ids[i, :length, None])[:, 0]
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_exchanged_and_sampled_from(kind):
    family, config = KINDS[kind]
    model = policy(family, **{"initializer_range": 0.1} | config)
    engine = engine_for(model)
    for version in (1, 2):
        receipt = engine.load_weights(shaken(model), version)
        assert receipt.version == version
        assert receipt.gap < 1e-5
        rollout = engine.generate(prompts(), sampling=SAMPLING, seed=version)
        assert rollout.policy_version.tolist() == [version] * 6
        gap = (rollout.behavior_logprobs - learner_says(model, rollout)).abs().max()
        assert gap < 1e-4
    engine.close()


def test_a_tied_head_that_is_sent_as_vllm_expects_it_is_caught():
    """Without a head of its own vLLM keeps a wrong one, and says nothing."""
    model = policy("qwen2", initializer_range=0.1, tie_word_embeddings=True)
    engine = engine_for(model)
    load = engine.service.load

    def without_head(payload, version):
        named = tuple((n, x) for n, x in payload.named if n != "lm_head.weight")
        load(type(payload)(named), version)

    engine.service.load = without_head
    with pytest.raises(SyncError, match="a tied head"):
        engine.load_weights(shaken(model, by=0.3), 1)
    engine.close()


def with_lora(**options):
    from peft import LoraConfig, get_peft_model

    about = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(policy(initializer_range=0.1), LoraConfig(**about)).eval()


@pytest.mark.parametrize("place", ["here", "server"])
def test_an_adapter_is_sent_as_an_adapter(place):
    from kedge.ext.vllm import PolicyTemplate, Server, VLLMEngine

    model = with_lora()
    if place == "here":
        engine = engine_for(model)
    else:
        spec = PolicyTemplate.of(model)
        weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        engine = VLLMEngine(Server.start(spec, weights), spec, pad_id=PAD)
    for version in (1, 2):
        sent = shaken(model)
        assert all("lora_" in name for name in sent)
        engine.load_weights(sent, version)
        rollout = engine.generate(prompts(), sampling=SAMPLING, seed=version)
        assert rollout.policy_version.tolist() == [version] * 6
        gap = (rollout.behavior_logprobs - learner_says(model, rollout)).abs().max()
        assert gap < 1e-4
    engine.close()


@pytest.mark.slow
def test_two_workers_of_one_vllm_are_sent_weights():
    model = policy(heads=2, hidden_size=64)
    engine = engine_for(model, tensor_parallel_size=2)
    for version in (1, 2):
        engine.load_weights(shaken(model), version)
        rollout = engine.generate(prompts(), sampling=SAMPLING, seed=version)
        gap = (rollout.behavior_logprobs - learner_says(model, rollout)).abs().max()
        assert gap < 1e-4
    engine.close()


def test_an_adapter_on_a_base_in_bfloat16():
    from kedge.ext.vllm import InProcess, PolicyTemplate, VLLMEngine
    from kedge.ext.vllm.engine import LOW_PRECISION

    model = with_lora()
    for p in model.parameters():
        p.data = p.data if p.requires_grad else p.data.bfloat16()
    spec = PolicyTemplate.of(model, dtype="bfloat16")
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    arguments = {"kv_cache_memory_bytes": 2**26, "dtype": "bfloat16"}
    before = {*Path("/dev/shm").iterdir(), *Path(gettempdir()).iterdir()}
    service = InProcess(spec, weights, arguments)
    engine = VLLMEngine(service, spec, pad_id=PAD, tolerance=LOW_PRECISION)
    engine.load_weights(shaken(model), 1)
    rollout = engine.generate(prompts(), sampling=SAMPLING, seed=1)
    gap = (rollout.behavior_logprobs - learner_says(model, rollout).float()).abs().mean()
    assert gap < LOW_PRECISION
    engine.load_weights(shaken(model), 2)
    # Nothing is left on disk or in shared memory, however this process ends.
    left = {*Path("/dev/shm").iterdir(), *Path(gettempdir()).iterdir()} - before
    assert [path.name for path in left if "kedge" in path.name] == []
    engine.close()


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_adapters_that_vllm_computes_otherwise_are_refused(options):
    from kedge.ext.vllm import PolicyTemplate

    with pytest.raises(ConfigError, match=f"the policy's adapter has {next(iter(options))}"):
        PolicyTemplate.of(with_lora(target_modules=["q_proj"], **options))


def test_the_head_sizes_are_those_of_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from kedge.ext.vllm.build import CPU_HEAD_SIZES

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES


CUTS = ({"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.7})


@pytest.mark.parametrize("where", ["process", "server"])
def test_top_k_top_p_and_min_p_come_with_the_tokens_that_they_allow(where):
    model = policy().eval()
    engine = engine_for(model) if where == "process" else server_of()
    for version, cut in enumerate(CUTS):
        engine.load_weights(trained(model), version)
        sampling = Sampling(max_new_tokens=6, temperature=0.8, **cut)
        rollout = engine.generate(prompts(), sampling=sampling, seed=3)
        assert rollout.allowed_tokens is not None
        for row in range(len(rollout)):
            check_allowed(model, rollout, row, sampling)
    check_ties(engine)
    if where == "process":
        engine.close()


def check_ties(engine):
    """Tokens tied with the last of the top-k stay in, and can be sampled."""
    model = policy().eval()
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2]  # pairs of equal tokens
    engine.load_weights(trained(model), len(CUTS))
    sampling = Sampling(max_new_tokens=6, temperature=0.8, top_k=5)
    rollout = engine.generate(prompts(), sampling=sampling, seed=3)
    assert (rollout.allowed_tokens >= 0).sum(-1).unique().tolist() == [6]
    for row in range(len(rollout)):
        check_allowed(model, rollout, row, replace(sampling, top_k=6))


def check_allowed(model, rollout, row, sampling):
    """The tokens and log-probabilities of one row are those of the learner's own code."""
    prompt = rollout.prompts.ids[row][rollout.prompts.mask[row]]
    ids = torch.cat([prompt, rollout.ids[row]])[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    logits = restrict(logits, sampling, 9, torch.tensor([], dtype=torch.int64))
    for tokens, at in zip(rollout.allowed_tokens[row], logits, strict=True):
        assert {*tokens[tokens >= 0].tolist()} == {*(at > -torch.inf).nonzero()[:, 0].tolist()}
    got = logits.log_softmax(-1).gather(-1, rollout.ids[row][:, None])[:, 0]
    torch.testing.assert_close(got, rollout.behavior_logprobs[row], atol=1e-4, rtol=0)
