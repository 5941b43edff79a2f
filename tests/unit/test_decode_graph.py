"""The captured decode step, with a graph that runs the step: the same tokens as without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kedge.backends.hf import decode
from kedge.backends.hf.decode_graph import DecodeGraph
from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.types import Sampling
from tests.contract.embedded import policy, prompts

FAMILIES = ["llama", "qwen2", "gpt2", "gpt_neox"]


class Rerun:
    """Runs the step where a CUDA graph would replay it."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def replay(self) -> None:
        with self.graph._fixed_slots():
            self.graph._logits = self.graph._body()


@contextlib.contextmanager
def graphs(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Decode steps are "captured"; yields the batch size of each capture."""
    captured: list[int] = []

    def capture(graph: Any, tokens: torch.Tensor) -> bool:
        captured.append(len(tokens))
        graph._graph, graph._logits = Rerun(graph), tokens
        return True

    def step(graph: Any, tokens: torch.Tensor) -> torch.Tensor:
        replayed(graph, tokens)
        return graph._logits

    replayed = DecodeGraph.step
    with patch.context() as p:
        p.setattr(torch.cuda, "CUDAGraph", object)
        p.setattr(decode, "can_capture", lambda *_: True)
        p.setattr(DecodeGraph, "capture", capture)
        p.setattr(DecodeGraph, "step", step)
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
