"""The captured decode step, with a graph that runs the step: the same tokens as without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kedge.rollout.embedded import decode
from kedge.rollout.embedded.decode import DecodeGraph
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.types import Rollout, Sampling
from tests.contract.embedded import policy, prompts

FAMILIES = ["llama", "qwen2", "gpt2", "gpt_neox"]


class Rerun:
    """Runs the step where a CUDA graph would replay it, into the same tensors each time."""

    def __init__(self, graph: Any, forward: Any) -> None:
        self.graph, self.forward = graph, forward

    def replay(self) -> None:
        with self.graph._fixed_slots():
            results = self.graph._run(self.forward)
        for kept, new in zip(_tensors(self.graph._result), _tensors(results), strict=True):
            kept.copy_(new)


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


@contextlib.contextmanager
def graphs(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Decode steps are "captured"; yields the batch size of each capture."""
    captured: list[int] = []

    def capture(graph: Any, tokens: torch.Tensor, forward: Any) -> bool:
        captured.append(len(tokens))
        graph._tokens.copy_(tokens[:, None])
        with graph._fixed_slots():
            graph._result = graph._run(forward)
        graph._graph = Rerun(graph, forward)
        return True

    with patch.context() as p:
        p.setattr(torch.cuda, "CUDAGraph", object)
        p.setattr(decode, "can_capture", lambda *_: True)
        p.setattr(DecodeGraph, "capture", capture)
        yield captured


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_step_samples_the_same_tokens(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EmbeddedEngine(policy(family, max_positions=256), pad_id=0)
    batch = prompts(copies=2)
    sampling = Sampling(max_new_tokens=200, stop_ids=(1, 2, 3))
    plain = engine.generate(batch, sampling=sampling, seed=3)
    with graphs(monkeypatch) as captured:
        replayed = engine.generate(batch, sampling=sampling, seed=3)
    assert len(captured) > 1  # rows were dropped, or the slots were full
    assert torch.equal(plain.ids, replayed.ids)
    assert torch.equal(plain.terminated, replayed.terminated)
    torch.testing.assert_close(plain.behavior_logprobs, replayed.behavior_logprobs)


def test_continuous_sampling_with_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for context in (graphs(monkeypatch), contextlib.nullcontext([1])):
        model = policy("llama", max_positions=256)
        engine = EmbeddedEngine(model, pad_id=0, shares_weights=False, chunk_rows=5)
        with context as captured:
            sampling = Sampling(max_new_tokens=90, stop_ids=(1, 2, 3), min_new_tokens=4)
            engine.submit(prompts(copies=2), sampling=sampling, seed=3)
            parts = [engine.advance()]
            weights = {k: v * 0.9 for k, v in engine.model.state_dict().items()}
            engine.load_weights(weights, version=1)
            while engine.unfinished:
                parts.append(engine.advance())
        assert captured
        rollout = Rollout.cat([x for x in parts if x is not None])
        order = rollout.prompts.row.argsort()
        results.append([x[order] for x in (rollout.ids, rollout.token_version)])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
