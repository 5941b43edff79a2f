"""Quicker layers give the numbers of torch's, and models are afterwards as they were."""

import copy
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from kedge.algorithms import ppo
from kedge.ext.cpu import backend, matmul, threads
from kedge.loop.stages import micro_batches
from kedge.models.model import checkpoint_activations
from kedge.ops.kernels import Kernels
from kedge.records.types import Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy
from tests.learners import VOCAB, experience, learner, one_rank, rollout

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def every_product_by_onednn(monkeypatch):
    monkeypatch.setattr(matmul, "_amd", lambda: True)
    monkeypatch.setattr(matmul, "_unused_by_mkl", lambda: True)
    monkeypatch.setattr(matmul, "SMALLEST", 0)


def counted(monkeypatch, *functions):
    """How often each of these autograd functions has been applied."""
    seen = dict.fromkeys(functions, 0)
    for function in functions:

        def apply(*args, function=function, plain=function.apply):
            seen[function] += 1
            return plain(*args)

        monkeypatch.setattr(function, "apply", apply)
    return seen


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2"])
def test_the_learner_uses_them_and_the_numbers_stay(family, checkpointing, monkeypatch):
    seen = counted(monkeypatch, matmul._Linear)
    results = []
    for quick in (True, False):
        how = {"gradient_checkpointing": checkpointing, "max_grad_norm": 1.0}
        found = learner(family, policy=tiny_policy(family, vocab_size=VOCAB), **how)
        if not quick:
            found._kernels = Kernels([])
        before = dict(seen)
        note = found.compute_logprobs(rollout(), values=True, reference=True, full_kl=False)
        batch, algo = experience(rollout()), ppo()
        step = micro_batches(batch, torch.arange(6), algo, 2, one_rank)
        metrics = found.optimizer_step(step, algo.loss)
        assert all((seen[f] > before[f]) == quick for f in seen)
        results.append((note, metrics, [p.detach() for p in found.module.parameters()]))
    (a, x, mine), (b, y, theirs) = results
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.values, b.values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.ref_logprobs, b.ref_logprobs, atol=1e-5, rtol=1e-5)
    assert x == pytest.approx(y, rel=1e-4, abs=1e-6)
    for p, q in zip(mine, theirs, strict=True):  # Adam enlarges what rounding leaves of zero
        assert float(((p - q).abs() > 1e-4).float().mean()) < 0.01


def test_models_compute_as_before_after_the_block_even_after_an_error():
    model = tiny_policy("gpt2")

    def fail():
        with Kernels([model]).active():
            assert "forward" in vars(model.transformer.h[0].mlp.c_fc)
            assert isinstance(model.transformer.h[0].mlp.c_fc, Conv1D)
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert not any("forward" in vars(m) for m in model.modules())
    assert copy.deepcopy(model) is not model


def test_two_blocks_of_one_model_may_overlap():
    model, ids = tiny_policy(), torch.arange(5)[None]
    want = model(input_ids=ids).logits
    first, second = Kernels([model]), Kernels([model])
    with first.active():
        with second.active():
            inside = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
    for found in (inside, after):
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_layers_of_other_kinds_and_layers_with_a_forward_of_their_own_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked, embedding = nn.Linear(4, 4), nn.Embedding(4, 4)
    hooked.forward = lambda x: -x
    double = nn.Linear(4, 4).double()
    model = nn.Sequential(Doubled(4, 4), embedding, double)
    assert list(backend._layers(model)) == []
    model.append(hooked)
    with Kernels([model]).active():
        assert hooked(torch.ones(4)).tolist() == [-1.0] * 4
    assert hooked(torch.ones(4)).tolist() == [-1.0] * 4


def test_layers_may_be_called_by_keyword():
    model = nn.Sequential(nn.Linear(4, 3), nn.Embedding(5, 3))
    want = model[0](input=torch.ones(2, 4)), model[1](input=torch.tensor([1, 2]))
    for context in (Kernels([model]).active(), Kernels([model]).prepacked(rows=2)):
        with context, torch.no_grad():
            found = model[0](input=torch.ones(2, 4)), model[1](input=torch.tensor([1, 2]))
        torch.testing.assert_close(found, want)


def test_nothing_is_replaced_where_torch_is_as_quick(monkeypatch):
    monkeypatch.setattr(matmul, "_amd", lambda: False)
    monkeypatch.setattr(backend, "may_run_in_bf16", lambda weight: False)
    assert list(backend._layers(tiny_policy())) == []


def test_one_variable_turns_the_kernels_off(monkeypatch):
    seen = counted(monkeypatch, matmul._Linear)
    x, weight = torch.ones(4, 4), torch.ones(3, 4)
    monkeypatch.setenv("KEDGE_CPU_KERNELS", "0")
    assert list(backend._layers(tiny_policy())) == []
    matmul.linear(x, weight)
    assert seen[matmul._Linear] == 0
    monkeypatch.setenv("KEDGE_CPU_KERNELS", "1")
    matmul.linear(x, weight)
    assert seen[matmul._Linear] == 1


def test_generation_by_a_small_model_leaves_torchs_threads_as_they_were():
    used = []
    engine = EmbeddedEngine(tiny_policy(vocab_size=VOCAB), pad_id=0, shares_weights=True)
    engine.model.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    engine.generate(rollout().prompts, sampling=Sampling(max_new_tokens=3), seed=0)
    assert used == [1, 1, 1]
    assert torch.get_num_threads() == 2


def test_barriers_stop_spinning_once_threads_are_preempted(monkeypatch):
    asked = []
    monkeypatch.setattr(threads, "_keep_idle_team", lambda pid: asked.append(switches))
    torch.set_num_threads(2)
    for switches in (200, 899, 901, 1500):  # involuntary, in 10 CPU seconds
        used = SimpleNamespace(ru_nivcsw=switches, ru_utime=8.0, ru_stime=2.0)
        monkeypatch.setattr(threads, "_last", [0.0, 0.0])
        monkeypatch.setattr(threads.resource, "getrusage", lambda _, used=used: used)
        with Kernels([tiny_policy()]).active():
            pass
    assert asked == [901, 1500]


def test_a_process_has_one_idle_team():
    for _ in range(2):
        threads._keep_idle_team(os.getpid())
    assert [thread.name for thread in threading.enumerate()].count("kedge-idle-team") == 1


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_packed_weights_give_the_same_numbers_to_the_bit(family):
    model, ids = tiny_policy(family).eval(), torch.arange(32).view(16, 2)
    kernels = Kernels([model])
    with torch.no_grad():
        with kernels.active():
            want = model(input_ids=ids).logits
        with kernels.prepacked(rows=16):
            found = model(input_ids=ids).logits
    assert torch.equal(found, want)
    assert not any("forward" in vars(m) for m in model.modules())


def test_with_avx2_only_packed_products_are_replaced(monkeypatch):
    monkeypatch.setattr(matmul, "_unused_by_mkl", lambda: False)
    monkeypatch.setattr(backend, "may_run_in_bf16", lambda weight: False)
    layer, x = nn.Linear(4, 3), torch.randn(16, 4)
    kernels = Kernels([layer])
    with torch.no_grad():
        want = layer(x)
        with kernels.active():
            assert "forward" not in vars(layer)
        with kernels.prepacked(rows=16):
            assert "forward" in vars(layer)
            torch.testing.assert_close(layer(x), want)
            monkeypatch.setattr(functional, "linear", lambda *_: "MKL")
            assert layer(torch.ones(256, 4)).shape == (256, 3)
            assert layer(torch.ones(257, 4)) == "MKL"
    assert "forward" not in vars(layer)


def test_packed_weights_are_not_used_where_a_gradient_is_needed():
    layer, x = nn.Linear(4, 3), torch.ones(16, 4)
    with Kernels([layer]).prepacked(rows=16):
        layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 4), 16.0))


def test_memory_for_packed_weights(monkeypatch):
    monkeypatch.setattr(backend, "PREPACKED_BYTES", 200)
    sizes = {"low": False, "checkpointing": False}
    assert backend.prepacked_bytes(50, **sizes) == 200
    assert backend.prepacked_bytes(51, **sizes) == 0
    monkeypatch.setattr(matmul, "_amd", lambda: False)
    assert backend.prepacked_bytes(50, **sizes) == 0


def test_checkpointed_models_are_packed_within_a_lower_limit(monkeypatch):
    model = tiny_policy("qwen2").eval()
    monkeypatch.setattr(backend, "_SPARING_BYTES", 1)
    packed, usual = [], backend._build_prepacked_forward
    monkeypatch.setattr(
        backend, "_build_prepacked_forward", lambda *a, **k: (packed.append(1), usual(*a, **k))[1]
    )
    with Kernels([model]).prepacked(rows=16):
        assert packed
    packed.clear()
    checkpoint_activations(model)
    with Kernels([model]).prepacked(rows=16):
        assert not packed
