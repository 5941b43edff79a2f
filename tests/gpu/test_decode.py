"""CUDA graphs of the decode step: the same samples, also while another thread trains."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import warnings
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kedge.records.types import Rollout, Sampling
from kedge.rollout.embedded import decode
from kedge.rollout.embedded.decode import GrowingLayer
from kedge.rollout.embedded.engine import EmbeddedEngine
from tests.contract.embedded import policy, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SAMPLING = Sampling(max_new_tokens=200, stop_ids=(1, 2, 3))


def engine(family: str, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(policy(family, max_positions=256).cuda(), pad_id=0, **options)


def count_captures(patch: pytest.MonkeyPatch) -> list[bool]:
    captured: list[bool] = []
    capture = decode.DecodeGraph.capture

    def counted(self: Any, tokens: torch.Tensor, forward: Any) -> bool:
        captured.append(capture(self, tokens, forward))
        return captured[-1]

    patch.setattr(decode.DecodeGraph, "capture", counted)
    return captured


def check(replayed: Rollout, plain: Rollout) -> None:
    assert torch.equal(replayed.ids, plain.ids)
    assert torch.equal(replayed.terminated, plain.terminated)
    limits = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(replayed.behavior_logprobs, plain.behavior_logprobs, **limits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox", "opt"])
def test_graphs_sample_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, sampler = count_captures(monkeypatch), engine(family)
    replayed = sampler.generate(prompts(copies=4), sampling=SAMPLING, seed=3)
    assert captured
    assert all(captured)
    count = len(captured)
    monkeypatch.setenv("KEDGE_CUDA_GRAPHS", "0")
    plain = sampler.generate(prompts(copies=4), sampling=SAMPLING, seed=3)
    assert len(captured) == count
    check(replayed, plain)


def test_graphs_are_captured_while_another_thread_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, sampler = count_captures(monkeypatch), engine("llama", shares_weights=False)
    expected = sampler.generate(prompts(copies=4), sampling=SAMPLING, seed=3)
    stop = threading.Event()
    steps: list[float] = []
    errors: list[str] = []
    model = policy("llama").cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        ids = torch.randint(0, 64, (8, 50)).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with decode.capturing:
            torch.cuda.empty_cache()
        return float(loss)

    def train() -> None:
        try:
            while not stop.is_set():
                steps.append(step())
        except Exception:
            errors.append(traceback.format_exc())

    with warnings.catch_warnings():  # torch has a notice on the context of a new thread
        warnings.simplefilter("ignore")
        step()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        time.sleep(1)
        for _ in range(3):
            check(sampler.generate(prompts(copies=4), sampling=SAMPLING, seed=3), expected)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert all(captured)
    assert len(steps) > 3


def test_a_step_that_cannot_be_captured_runs_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured, sampler = count_captures(monkeypatch), engine("llama")
    forward = sampler.model.model.norm.forward

    def waiting(hidden: torch.Tensor) -> torch.Tensor:
        assert bool(hidden.isfinite().all())  # the host waits
        return forward(hidden)

    expected = sampler.generate(prompts(), sampling=SAMPLING, seed=3)
    monkeypatch.setattr(sampler.model.model.norm, "forward", waiting)
    captured.clear()
    check(sampler.generate(prompts(), sampling=SAMPLING, seed=3), expected)
    assert captured == [False]
    decode._failed.clear()
    monkeypatch.undo()
    check(sampler.generate(prompts(), sampling=SAMPLING, seed=3), expected)


@pytest.mark.parametrize("graphs", ["0", "1"])
def test_grouped_heads_under_autocast(graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CUDA_GRAPHS", graphs)
    model = policy("qwen2", max_positions=256).cuda()
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    sampler = EmbeddedEngine(model, pad_id=0, autocast=torch.bfloat16)
    fast = sampler.generate(prompts(copies=4), sampling=SAMPLING, seed=3)
    assert {layer.keys.dtype for layer in stored_layers(monkeypatch, sampler)} == {torch.bfloat16}
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
    check(fast, sampler.generate(prompts(copies=4), sampling=SAMPLING, seed=3))


def stored_layers(patch: pytest.MonkeyPatch, sampler: EmbeddedEngine) -> list[Any]:
    """The layers of the cache of one more call."""
    layers: list[Any] = []
    update = GrowingLayer.update

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers.append(self)
        return update(self, *args, **kwargs)

    with patch.context() as patched:
        patched.setattr(GrowingLayer, "update", noted)
        sampler.generate(prompts(copies=4), sampling=SAMPLING, seed=3)
    return layers


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_continuous_sampling_replays_graphs_across_weight_updates(
    autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = count_captures(monkeypatch)
    results = []
    for graphs in ("1", "0"):
        monkeypatch.setenv("KEDGE_CUDA_GRAPHS", graphs)
        sampler = engine("llama", shares_weights=False, autocast=autocast, chunk_rows=8)
        sampler.submit(prompts(copies=4), sampling=SAMPLING, seed=3)
        parts, updated = [], 0
        while sampler.unfinished:
            part = sampler.advance()
            if part is not None:
                parts.append(part)
            if updated < 3:
                updated += 1
                weights = {k: v * 0.9 for k, v in sampler.model.state_dict().items()}
                sampler.load_weights(weights, version=updated)
        results.append(Rollout.cat(parts))
        assert bool(captured) == (graphs == "1")
        assert all(captured)
        captured.clear()
    replayed, plain = results
    order = [x.prompts.row.argsort() for x in results]
    assert torch.equal(replayed.ids[order[0]], plain.ids[order[1]])
    limits = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(
        replayed.behavior_logprobs[order[0]], plain.behavior_logprobs[order[1]], **limits
    )
    assert torch.equal(replayed.token_version[order[0]], plain.token_version[order[1]])


def test_a_batch_frees_its_graph_at_its_end() -> None:
    sampler = engine("llama")
    gc.disable()
    try:
        held = []
        for _ in range(4):
            sampler.generate(prompts(copies=4), sampling=SAMPLING, seed=3)
            held.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert held[3] == held[1]
