"""The recorded decode step: the same tokens and log-probabilities, bit by bit."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.backends.hf import recorded_step
from kedge.backends.hf.decode import CausalStepper
from kedge.backends.hf.kv_cache import GrowingLayer
from kedge.backends.hf.recorded_step import Program, RecordedStep
from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.types import Rollout, Sampling
from tests.contract.embedded import FAMILIES, policy, prompts

SPECIAL = {"mistral", "gemma2", "lfm2"}  # layers that do not keep all keys
SAMPLING = Sampling(max_new_tokens=60, stop_ids=(2,))


@contextlib.contextmanager
def replays(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yields the number of rows of each replayed step."""
    rows: list[int] = []
    usual = Program.__call__

    def call(program: Program, layers: Any, tokens: Tensor, *others: Any) -> Tensor:
        rows.append(len(tokens))
        return usual(program, layers, tokens, *others)

    with patch.context() as p:
        p.setattr(Program, "__call__", call)
        yield rows


@contextlib.contextmanager
def never_recorded(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as p:
        p.setattr(recorded_step, "can_record", lambda *_: False)
        yield


def same(a: Rollout, b: Rollout) -> bool:
    return torch.equal(a.ids, b.ids) and torch.equal(a.behavior_logprobs, b.behavior_logprobs)


def complete(engine: EmbeddedEngine, sampling: Sampling, changed: Callable[[], None]) -> Rollout:
    """A batch sampled in slots, with weights that change on the way."""
    engine.submit(prompts(copies=4), sampling=sampling, seed=1)
    parts = []
    for version in range(1, 1000):
        if not engine.unfinished:
            break
        parts += [x] if (x := engine.advance()) is not None else []
        if version == 2:
            changed()
    return Rollout.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_samples_the_same(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine(policy(family, max_positions=256), pad_id=0, chunk_rows=9)
    batch = prompts(copies=4)
    with never_recorded(monkeypatch):
        expected = engine.generate(batch, sampling=SAMPLING, seed=1)
    with replays(monkeypatch) as rows:
        assert same(engine.generate(batch, sampling=SAMPLING, seed=1), expected)
    assert (len(rows) > 40) == (family not in SPECIAL)
    if family not in SPECIAL:
        assert len(set(rows)) > 2  # rows ended, without a recording for each number of them


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_slots_see_new_weights(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sample() -> Rollout:
        model = policy(family, max_positions=256)
        engine = EmbeddedEngine(model, pad_id=0, chunk_rows=6)

        @torch.no_grad()
        def change() -> None:
            for p in model.parameters():
                p.mul_(1.5)
            engine._version = 1

        return complete(engine, SAMPLING, change)

    with never_recorded(monkeypatch):
        expected = sample()
    with replays(monkeypatch) as rows:
        assert same(sample(), expected)
    assert len(rows) > 40


def test_replays_read_the_weights_of_the_moment() -> None:
    model = policy("llama", max_positions=256).eval()
    steppers = [CausalStepper(model, x) for x in (RecordedStep(model), None)]
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with torch.no_grad():
        for stepper in steppers:
            stepper.start(ids, ids > 0, torch.arange(2))
        for step in range(8):
            model.lm_head.weight.mul_(1.1)
            logits = [stepper.step(torch.tensor([step, 3])) for stepper in steppers]
            assert torch.equal(*logits)
    assert steppers[0].recorded is not None
    assert steppers[0].recorded._programs


def test_other_modules_and_hooks_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(x)

    hooked, replaced = policy("llama", max_positions=256), policy("llama", max_positions=256)
    calls = []
    hooked.lm_head.register_forward_hook(lambda *_: calls.append(1))
    replaced.lm_head.__class__ = Counting
    patched, own = policy("llama", max_positions=256), []
    usual = patched.lm_head.forward
    patched.lm_head.forward = lambda x: own.append(1) or usual(x)
    with replays(monkeypatch) as rows:
        for model in (hooked, replaced, patched):
            EmbeddedEngine(model, pad_id=0).generate(prompts(), sampling=SAMPLING, seed=1)
    assert not rows
    assert len(calls) == len(own) == Counting.calls >= 40


def test_weights_are_freed_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("llama", max_positions=256)
    weight = weakref.ref(model.lm_head.weight)
    engine = EmbeddedEngine(model, pad_id=0)
    gc.collect()
    gc.disable()
    try:
        with replays(monkeypatch) as rows:
            engine.generate(prompts(), sampling=SAMPLING, seed=1)
        assert rows
        del engine, model
        assert weight() is None
    finally:
        gc.enable()


class Toy:
    """One layer whose step is a function of its tokens and of the values in the cache."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.layer, self.function = GrowingLayer(), step
        self.layer.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4))

    def step(self, tokens: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        states = tokens[:, None, :, None].float().expand(-1, 1, 1, 4)
        keys, _ = self.layer.update(states, states)
        return self.function(keys, tokens)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda keys, _: keys.sum((1, 2)) * float(keys.sum()), "reads a tensor on the host"),
        (lambda keys, _: torch.from_numpy(keys.sum((1, 2)).numpy()), "reads a tensor on the host"),
        (lambda keys, _: keys.sum((1, 2)) + torch.rand(2, 4), "other logits"),
        (lambda keys, _: keys.sum((1, 2)) if keys.shape[2] % 2 else keys.mean((1, 2)), "different"),
        (lambda keys, _: keys[:, 0, int(keys.shape[2] > 6)], "a size of 0 became 1"),
    ],
)
@torch.no_grad()
def test_steps_that_are_more_than_a_list_of_calls(
    step: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_step, "_UNCHECKED", 2)
    toy, plain = Toy(step), Toy(step)
    recorded = RecordedStep(nn.Linear(1, 1))
    for i in range(12):
        inputs = torch.tensor([[i], [2 * i]]), torch.tensor([[i], [i]]), None
        torch.manual_seed(i)
        expected = plain.step(*inputs)
        torch.manual_seed(i)
        logits = recorded(toy.step, [toy.layer], *inputs)
        if why != "other logits":  # for which random numbers were drawn twice
            assert torch.equal(logits, expected)
        assert torch.equal(toy.layer.keys, plain.layer.keys)
    assert why in (recorded.failure or "")
