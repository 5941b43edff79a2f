"""Matrix products by either library inside torch, against float64."""

import pytest
import torch
from torch.nn import functional

from kedge.ext.cpu import matmul as module
from kedge.ext.cpu.backend import CPUBackend
from kedge.ext.cpu.matmul import by_onednn, linear, outer, product

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@pytest.fixture(params=["onednn", "mkl"])
def library(request, monkeypatch):
    for rule in ("_amd", "_unused_by_mkl"):
        monkeypatch.setattr(module, rule, lambda: request.param == "onednn")
    monkeypatch.setattr(module, "SMALLEST", 0)
    return request.param


def drawn(*shape):
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g)


def close(found, want):
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-5)


SHAPES = [(7, 5, 3), (1, 64, 64), (64, 1, 33), (129, 40, 17), (300, 172, 64), (20, 530, 600)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_products_equal_float64(m, k, n, library):
    x, w, g, bias = drawn(m, k), drawn(n, k), drawn(m, n), drawn(n)
    close(product(x, w), x.double() @ w.double().T)
    close(product(x, w, bias), x.double() @ w.double().T + bias)
    own = CPUBackend()
    close(own.product(x, w, bias, out_buffer=torch.empty(m, n)), x.double() @ w.double().T + bias)
    close(outer(g, x), g.double().T @ x.double())
    total = drawn(n, k)
    want = total.double() + g.double().T @ x.double()
    own.add_outer(total, g, x)
    close(total, want)
    total = drawn(m, k)
    want = total.double() + g.double() @ w.double()
    own.add_product(total, g, w)
    close(total, want)


def test_gradients_of_wide_weights_are_contiguous(library, monkeypatch):
    g, x = drawn(20, 600), drawn(20, 530)
    for many_rows in (1024, 16):
        monkeypatch.setattr(module, "_MANY_ROWS", many_rows)
        monkeypatch.setattr(module, "_LARGE", 0)
        gradient = outer(g, x)
        assert gradient.is_contiguous()
        close(gradient, g.double().T @ x.double())


def test_sides_may_lie_in_any_order(library):
    x, w = drawn(40, 30).T, drawn(2, 20, 40)[1]
    close(product(x, w), x.double() @ w.double().T)
    wide, overlapping = drawn(30, 80)[:, ::2], drawn(60).unfold(0, 40, 1)
    for side in (wide, overlapping):
        close(product(side, w), side.double() @ w.double().T)
        close(product(w, side), w.double() @ side.double().T)


def test_a_second_derivative_is_refused_rather_than_zero(monkeypatch):
    monkeypatch.setattr(module, "_unused_by_mkl", lambda: True)
    monkeypatch.setattr(module, "SMALLEST", 0)
    x, w = drawn(8, 6).requires_grad_(), drawn(4, 6).requires_grad_()
    (grad,) = torch.autograd.grad(linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_a_side_may_be_one_row_seen_many_times(library):
    x, w, row = drawn(30, 12), drawn(9, 12), drawn(1, 12)
    close(product(row.expand(30, 12), w), (row.double() @ w.double().T).expand(30, 9))
    close(outer(torch.ones(1, 1).expand(30, 9), x), x.double().sum(0).expand(9, 12))
    leaf = x.clone().requires_grad_()
    linear(leaf, w).sum().backward()
    close(leaf.grad, w.double().sum(0).expand(30, 12))


@pytest.mark.parametrize("shape", [(30, 12), (2, 15, 12), (2, 3, 5, 12)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_linear_layer_with_gradients_equals_float64(shape, with_bias, library):
    inputs = [drawn(*shape), drawn(9, 12), drawn(9) if with_bias else None]
    found, want = [], []
    for take, into, layer in ((torch.float32, found, linear), (torch.float64, want, None)):
        leaves = [None if t is None else t.detach().to(take).requires_grad_() for t in inputs]
        out = (layer or functional.linear)(*leaves)
        (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        into += [out, *(t.grad for t in leaves if t is not None)]
    assert found[0].shape == (*shape[:-1], 9)
    for mine, theirs in zip(found, want, strict=True):
        close(mine, theirs)


def test_the_input_of_a_frozen_layer_is_not_kept(monkeypatch):
    monkeypatch.setattr(module, "_unused_by_mkl", lambda: True)
    monkeypatch.setattr(module, "SMALLEST", 0)
    x, w = drawn(8, 6).requires_grad_(), drawn(4, 6)

    def kept():
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (shapes.append(tuple(t.shape)), t)[1], lambda t: t
        ):
            linear(x, w)
        return shapes

    assert kept() == [(4, 6)]
    w.requires_grad_()
    assert kept() == [(8, 6), (4, 6)]


def test_half_precision_and_autocast_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(module, "_unused_by_mkl", lambda: True)
    monkeypatch.setattr(module, "SMALLEST", 0)
    monkeypatch.setattr(module, "_Linear", None)  # would fail if it were used
    x, w = drawn(8, 6), drawn(4, 6)
    assert linear(x.bfloat16(), w.bfloat16()).dtype == torch.bfloat16
    assert linear(x.double(), w.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, w).dtype == torch.bfloat16


def test_torchs_own_switch_turns_it_off(monkeypatch):
    monkeypatch.setattr(module, "_unused_by_mkl", lambda: True)
    assert by_onednn(torch.zeros(1))
    torch.backends.mkldnn.set_flags(False)
    try:
        assert not by_onednn(torch.zeros(1))
    finally:
        torch.backends.mkldnn.set_flags(True)


@pytest.mark.parametrize(
    ("maker", "capability", "all_products", "packed"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX2", False, True),
        ("AuthenticAMD", "DEFAULT", False, False),
        ("GenuineIntel", "AVX512", False, False),
    ],
)
def test_chosen_by_processor(maker, capability, all_products, packed, tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nvendor_id : {maker}\n")
    monkeypatch.setattr(module, "_CPUINFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    def chosen():
        monkeypatch.setattr(module, "_amd", module._amd.__wrapped__)
        x = torch.zeros(1)
        return by_onednn(x), module.by_prepacked_weights(x)

    usual = module._amd
    assert chosen() == (all_products, packed)
    info.unlink()
    monkeypatch.setattr(module, "_amd", usual)
    monkeypatch.setattr(module.platform, "processor", lambda: f"Family 26, {maker}")
    assert chosen() == (all_products, packed)
