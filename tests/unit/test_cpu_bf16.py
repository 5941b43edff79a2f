"""bfloat16 products under autocast on CPUs: torch's numbers, weights converted less often."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

from kedge.ext.before_rl.trl_trainers import train_with_kernels
from kedge.ext.cpu import matmul
from kedge.ext.cpu.matmul import SHORT_ATTENTION
from kedge.ops.attention import attend
from kedge.ops.kernels import Kernels

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN has no bfloat16 products here, which need AVX-512",
)


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setattr(matmul, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(matmul, "SMALLEST", 0)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def outputs_and_gradients(layer, x):
    x = x.clone().requires_grad_()
    with autocast():
        y = layer(x)
    layer.zero_grad()
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return y, x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("kind", [lambda: nn.Linear(48, 64), lambda: Conv1D(64, 48)])
def test_a_layer_gives_the_numbers_of_torchs_autocast(kind):
    torch.manual_seed(0)
    layer, x = kind(), torch.randn(2, 5, 48)
    expected = outputs_and_gradients(layer, x)
    with Kernels([layer]).active():
        actual = outputs_and_gradients(layer, x)
    assert "forward" not in vars(layer)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= 2**-7 * b.abs().max()


def test_a_weight_is_converted_once_per_block_and_again_after_it_changed(monkeypatch):
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    kernels, copies = Kernels([layer]), []
    plain = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: copies.append(1) or plain(*a, **k))
    with autocast(), kernels.active():
        first = layer(x)
        assert torch.equal(layer(x), first)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(layer(x), 2 * first)
    layer.weight.data.mul_(2)  # leaves the version of the weight as it is
    with autocast(), kernels.active():
        assert torch.equal(layer(x), 4 * first)
    assert len(copies) == 1


def test_packed_weights_are_bfloat16_under_autocast():
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 64), torch.randn(5, 1, 48)
    with torch.no_grad(), autocast():
        expected = layer(x)
        with Kernels([layer]).prepacked(rows=5):
            actual = layer(x)
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.parametrize(
    ("queries", "keys", "dtype"),
    [
        (4, 4, torch.float32),
        (1, SHORT_ATTENTION + 1, torch.float32),
        (2, SHORT_ATTENTION + 1, torch.bfloat16),
    ],
)
def test_attention_over_few_keys_or_of_one_token_is_float32(queries, keys, dtype):
    query = torch.randn(1, 1, queries, 8, dtype=torch.bfloat16)
    key = torch.randn(1, 1, keys, 8)
    layer = nn.Identity()
    layer.is_causal = False
    with autocast():
        output, _ = attend(layer, query, key, key, None)
    assert output.dtype == dtype
    output, _ = attend(layer, key, key, key, None)
    assert output.dtype == torch.float32


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, labels):
        y = self.second(torch.tanh(self.first(x)))
        return {"loss": ((y.float() - labels) ** 2).mean(), "logits": y}


def test_supervised_training_uses_the_weights_of_each_step(tmp_path, monkeypatch):
    """A fused optimizer does not change the version of a weight."""
    generator = torch.Generator().manual_seed(1)
    rows = [dict.fromkeys(("x", "labels"), torch.randn(64, generator=generator)) for _ in range(8)]
    losses = []
    for kernels in ("1", "0"):
        monkeypatch.setenv("KEDGE_CPU_KERNELS", kernels)
        options = {"optim": "adamw_torch_fused", "bf16": True, "use_cpu": True, "report_to": []}
        options |= {"max_steps": 6, "logging_steps": 1, "learning_rate": 1e-2, "disable_tqdm": True}
        args = TrainingArguments(str(tmp_path), save_strategy="no", **options)
        trainer = Trainer(Squared(), args, train_dataset=rows)
        train_with_kernels(trainer)
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[1][-1] < 0.7 * losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
