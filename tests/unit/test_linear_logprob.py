"""Log-probabilities from hidden states: exact, and never a full tensor of logits."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kedge.ops import linear_logprob as module
from kedge.ops.linear_logprob import Head, TokenConstraints, linear_kl, linear_logprob
from tests.storages import Largest

N, H, V = 7, 5, 1000


def case(dtype=torch.float64, bias=True):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=g, dtype=dtype)
    weight = torch.randn(V, H, generator=g, dtype=dtype)
    b = torch.randn(V, generator=g, dtype=dtype) if bias else None
    return hidden, weight, b, torch.randint(V, (N,), generator=g)


def plain(hidden, head, targets, constraints):
    """The same by the definition, all logits at once."""
    z = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    z = z / constraints.temperature
    never = torch.zeros_like(z, dtype=torch.bool)
    if constraints.banned is not None:
        never[constraints.banned[0].nonzero(), constraints.banned[1]] = True
    if constraints.allowed_tokens is not None:
        for i, ids in enumerate(constraints.allowed_tokens.tolist()):
            never[i, [j for j in range(V) if j not in ids]] = True
    logp = z.masked_fill(never, -math.inf).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(never, 0.0)).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def constraint_cases(targets):
    support = torch.full((N, 4), -1)
    support[:, 0] = targets
    support[: N - 2, 1] = (targets[: N - 2] + 300) % V
    support[:3, 3] = (targets[:3] + 77) % V
    ban = (torch.arange(N) % 2 == 0, tuple(((targets[:3] + 1) % V).tolist()))
    return {
        "plain": TokenConstraints(),
        "temperature": TokenConstraints(temperature=0.7),
        "banned": TokenConstraints(banned=ban, temperature=1.3),
        "support": TokenConstraints(allowed_tokens=support),
        "both": TokenConstraints(allowed_tokens=support, banned=ban),
    }


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (0.5, 3.0)])
@pytest.mark.parametrize("name", ["plain", "temperature", "banned", "support", "both"])
@pytest.mark.parametrize(("tile", "most"), [(256, 0), (256, None), (2100, None), (None, None)])
def test_equals_the_definition_with_gradients(
    tile, most, name, scale, softcap, entropy_grad, monkeypatch
):
    if most is not None:
        monkeypatch.setattr(module, "_KEPT", most)
    hidden, weight, bias, targets = case()
    constraints = constraint_cases(targets)[name]
    up = torch.randn(2, N, generator=torch.Generator().manual_seed(1), dtype=hidden.dtype)
    got, want = [], []
    for out, how in ((got, "tiles"), (want, "plain")):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        head = Head(leaves[1], leaves[2], scale, softcap)
        if how == "tiles":
            logp, entropy = linear_logprob(
                leaves[0],
                head,
                targets,
                constraints=constraints,
                entropy_grad=entropy_grad,
                tile=tile,
            )
        else:
            logp, entropy = plain(leaves[0], head, targets, constraints)
        loss = (up[0] * logp).sum()
        if entropy_grad:
            loss = loss + (up[1] * entropy).sum()
        loss.backward()
        out.extend([logp, entropy, *(x.grad for x in leaves)])
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_by_hand():
    # logits (0, ln 3): p = (1/4, 3/4); entropy = ln 4 - (3/4) ln 3
    head = Head(torch.tensor([[0.0], [math.log(3)]]))
    logp, entropy = linear_logprob(torch.ones(2, 1), head, torch.tensor([0, 1]))
    torch.testing.assert_close(logp, torch.tensor([0.25, 0.75]).log())
    torch.testing.assert_close(entropy, torch.full((2,), math.log(4) - 0.75 * math.log(3)))
    # a banned token leaves the other with certainty
    constraints = TokenConstraints(banned=(torch.tensor([True, False]), (0,)))
    logp, entropy = linear_logprob(
        torch.ones(2, 1), head, torch.tensor([1, 1]), constraints=constraints
    )
    torch.testing.assert_close(logp, torch.tensor([1.0, 0.75]).log())
    assert entropy[0] == 0


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("kept", [0, N * V])
def test_a_second_backward_pass_gives_the_same_gradients(kept, entropy_grad, monkeypatch):
    monkeypatch.setattr(module, "_KEPT", kept)
    hidden, weight, _, targets = case()
    weight.requires_grad_()
    logp, entropy = linear_logprob(
        hidden, Head(weight), targets, entropy_grad=entropy_grad, tile=N * 256
    )
    loss = logp.sum() + (entropy.sum() if entropy_grad else 0)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_bfloat16_states_have_the_scale_and_temperature_too(entropy_grad):
    hidden, weight, bias, targets = (
        x.bfloat16() if x.is_floating_point() else x for x in case(torch.float32)
    )
    constraints = TokenConstraints(temperature=0.7)
    found, want = [], []
    for out, dtype in ((found, torch.bfloat16), (want, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        head = Head(leaves[1], leaves[2], 0.5)
        if dtype == torch.bfloat16:
            logp, entropy = linear_logprob(
                leaves[0], head, targets, constraints=constraints, entropy_grad=entropy_grad
            )
        else:
            logp, entropy = plain(leaves[0], head, targets, constraints)
        (logp.sum() + (entropy.sum() if entropy_grad else 0)).backward()
        out += [logp, entropy, *(x.grad for x in leaves)]
    for mine, theirs in zip(found[:2], want[:2], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found[2:], want[2:], strict=True):
        assert (mine.double() - theirs).norm() <= 0.02 * theirs.norm()


def test_kl_equals_the_definition_and_is_zero_for_equal_models():
    hidden, weight, bias, _ = case()
    other, ref = torch.randn_like(hidden[:, :3]), torch.randn_like(weight[:, :3])
    p = (hidden @ weight.T + bias).div(0.8).log_softmax(-1)
    q = (0.5 * other @ ref.T).div(0.8).log_softmax(-1)
    for tile in (256, None):
        got = linear_kl(
            hidden,
            Head(weight, bias),
            other,
            Head(ref, None, 0.5),
            constraints=TokenConstraints(temperature=0.8),
            tile=tile,
        )
        torch.testing.assert_close(got, (p.exp() * (p - q)).sum(-1))
        same = linear_kl(hidden, Head(weight, bias), hidden, Head(weight, bias), tile=tile)
        torch.testing.assert_close(same, torch.zeros_like(same))


def test_no_rows():
    _, weight, bias, _ = case()
    weight.requires_grad_()
    empty = torch.zeros(0, H, dtype=weight.dtype, requires_grad=True)
    logp, entropy = linear_logprob(empty, Head(weight, bias), torch.zeros(0, dtype=torch.int64))
    (logp.sum() + 0 * entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert not weight.grad.any()


def test_large_logits_stay_finite():
    hidden, weight, _, targets = case(torch.float32)
    logp, entropy = linear_logprob(hidden * 1e4, Head(weight), targets, tile=256)
    want = (hidden.double() * 1e4 @ weight.double().T).log_softmax(-1)
    torch.testing.assert_close(
        logp.double(), want.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=0.1
    )
    assert entropy.isfinite().all()


class Calls(TorchDispatchMode):
    """Counts the products that write logits."""

    addmm_out = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.addmm_out += func is torch.ops.aten.addmm.out
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_never_holds_the_logits(softcap):
    rows, vocab, tile = 300, 2000, 300 * 256
    hidden = torch.randn(rows, 4, requires_grad=True)
    weight = torch.randn(vocab, 4, requires_grad=True)
    targets = torch.randint(vocab, (rows,))
    with Largest() as seen:
        logp, _ = linear_logprob(hidden, Head(weight, None, 1.0, softcap), targets, tile=tile)
        logp.sum().backward()
    assert seen.elements == tile
    with Largest() as seen:
        (hidden @ weight.T).log_softmax(-1)
    assert seen.elements == rows * vocab  # the watch sees what it watches for


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("kept", [0, N * 300, N * V])
def test_kept_tiles_save_a_product_and_change_rounding_alone(kept, entropy_grad, monkeypatch):
    hidden, weight, bias, targets = case()
    results, products = [], []
    for most in (0, kept):
        monkeypatch.setattr(module, "_KEPT", most)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        with Calls() as calls:
            logp, entropy = linear_logprob(
                leaves[0], Head(*leaves[1:]), targets, entropy_grad=entropy_grad, tile=N * 256
            )
            (logp.sum() + (entropy.sum() if entropy_grad else 0)).backward()
        results.append([logp, entropy, *(x.grad for x in leaves)])
        products.append(calls.addmm_out)
    assert all(map(torch.equal, results[0][:2], results[1][:2]))
    for found, want in zip(results[1][2:], results[0][2:], strict=True):
        assert torch.allclose(found, want, rtol=1e-12, atol=1e-14)
    blocks = math.ceil(V / 256)
    assert products[0] - products[1] == {0: 0, N * 300: 1, N * V: blocks}[kept]


def test_autocast_on_a_cpu_rounds_the_products_with_the_gradient_only():
    hidden, weight, _, targets = case(torch.float32)
    weight.requires_grad_()
    want, _ = linear_logprob(hidden, Head(weight), targets)
    (exact,) = torch.autograd.grad(want.sum(), weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, _ = linear_logprob(hidden, Head(weight), targets)
    assert logp.dtype == torch.float32
    assert torch.equal(logp, want)
    logp.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert 0 < (weight.grad - exact).abs().max() <= 2**-6 * exact.abs().max()


def test_logits_of_bfloat16_states_are_not_rounded():
    """Rounded to bfloat16, logits around 16 are 1/8 apart and log-probabilities off by 1e-2."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=g).bfloat16()
    weight = (3 * torch.randn(500, 32, generator=g)).bfloat16().float()
    targets = torch.randint(500, (64,), generator=g)
    found, entropy = linear_logprob(hidden, Head(weight), targets)
    want, spread = linear_logprob(hidden.float(), Head(weight), targets)
    assert found.dtype == torch.float32
    assert (found - want).abs().max() < 1e-4
    assert (entropy - spread).abs().max() < 1e-4
    rounded = (hidden @ weight.bfloat16().T).float().log_softmax(1).gather(1, targets[:, None])
    assert (rounded[:, 0] - want).abs().max() > 1e-2  # the same with rounded logits
