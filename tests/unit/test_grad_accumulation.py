"""Gradients of large weights added where they lie: the same numbers, in the same memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from kedge.ops.cpu import grad_accumulation as module
from kedge.ops.cpu.grad_accumulation import GradBuffers, embedding, gathered
from kedge.ops.linear_logprob import Head, linear_logprob


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(module, "_LARGE", 0)


def weight(rows=11, columns=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(rows, columns, generator=g))


def passes(table, head, *, plain):
    """Three backward passes through an embedding and an output layer."""
    for seed in range(3):
        ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(seed))
        rows = functional.embedding(ids, table, 3) if plain else embedding(table, ids, 3)
        logprobs, _ = linear_logprob(rows.flatten(0, 1).tanh(), Head(head), ids.flatten(), tile=20)
        logprobs.sum().backward()


@pytest.mark.parametrize("tied", [False, True])
def test_equals_what_autograd_adds(tied):
    want = [weight(), weight(seed=1)]
    found = [weight(), weight(seed=1)]
    passes(want[0], want[0 if tied else 1], plain=True)
    gathering = GradBuffers()
    with gathering.active():
        passes(found[0], found[0 if tied else 1], plain=False)
    for mine, theirs in list(zip(found, want, strict=True))[: 1 if tied else 2]:
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-6)
    assert (found[0].grad[3] == 0).all() or tied  # the padding row


def test_a_step_begins_from_nothing_in_the_memory_of_the_last():
    table, head, gathering = weight(), weight(seed=1), GradBuffers()
    seen = []
    for _ in range(2):
        table.grad = head.grad = None
        with gathering.active():
            passes(table, head, plain=False)
        seen.append((table.grad.data_ptr(), table.grad.clone(), head.grad.clone()))
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[0][1:], seen[1][1:], atol=0, rtol=0)


def test_memory_of_another_precision_or_shape_is_not_used():
    table, gathering = weight(), GradBuffers()
    gathering.of(table)
    table.grad = None
    table.data = torch.zeros(2, 2, dtype=torch.float64)
    assert gathering.of(table).shape == (2, 2)
    assert table.grad.dtype == torch.float64


def test_left_to_autograd_outside_for_small_weights_and_for_weights_that_are_watched(monkeypatch):
    table = weight()
    assert gathered(table) is None
    with GradBuffers().active():
        assert gathered(table) is not None
        assert gathered(table * 2) is None
        assert gathered(weight().requires_grad_(False)) is None
        watched = weight()
        watched.register_hook(lambda g: g)
        assert gathered(watched) is None
        watched = weight()
        watched.register_post_accumulate_grad_hook(lambda p: None)
        assert gathered(watched) is None
        monkeypatch.setattr(module, "_LARGE", 1000)
        assert gathered(table) is None
    assert gathered(table) is None


def test_a_hook_sees_the_gradient_of_the_embedding():
    table, seen = weight(), []
    table.register_hook(lambda g: seen.append(g.clone()))
    with GradBuffers().active():
        embedding(table, torch.tensor([1, 1])).sum().backward()
    assert seen[0][1].tolist() == [2.0] * 4
    torch.testing.assert_close(table.grad, seen[0])
