"""LoRA layers give PEFT's numbers and gradients with fewer products."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from kedge.backends.hf.model import checkpoint_activations
from kedge.backends.hf.peft import AdapterSwitch
from kedge.ops.cpu import lora, matmul
from kedge.ops.cpu.patch import Kernels
from kedge.testing import tiny_policy

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)
TARGETS = ["q_proj", "k_proj", "down_proj"]  # with and without bias
IDS = torch.arange(12).view(2, 6)


@pytest.fixture(autouse=True)
def every_product_by_onednn(monkeypatch):
    monkeypatch.setattr(matmul, "_unused_by_mkl", lambda: True)
    monkeypatch.setattr(matmul, "SMALLEST", 0)


@pytest.fixture
def applied(monkeypatch):
    count, plain = [], lora._LoraLinear.apply
    monkeypatch.setattr(lora._LoraLinear, "apply", lambda *args: (count.append(1), plain(*args))[1])
    return count


def adapted(**options):
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=TARGETS, task_type="CAUSAL_LM", **options
    )
    model = get_peft_model(tiny_policy("qwen2"), config)
    model.add_adapter("second", config)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zeros at first
            torch.nn.init.normal_(p)
    return model.eval()


def outputs(model):
    """Logits, and the gradient of everything that trains."""
    model.zero_grad()
    logits = model(input_ids=IDS).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_logits_and_gradients_are_those_of_peft(checkpointing, applied):
    model = adapted()
    if checkpointing:
        checkpoint_activations(model.get_base_model())
        model.train()
    expected = outputs(model)
    with Kernels([model]).active():
        results = outputs(model)
    assert applied
    assert len(results) == len(expected) > 6
    for result, target in zip(results, expected, strict=True):
        torch.testing.assert_close(result, target, atol=1e-5, rtol=1e-4)
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_switched_adapter_and_the_base_alone(applied):
    model = adapted()
    switch, kernels = AdapterSwitch(model), Kernels([model])
    logits = []
    for name in ("default", "second", None):
        with torch.no_grad(), switch.active(name):
            expected = model(input_ids=IDS).logits
            for context in (kernels.active(), kernels.packed(rows=12)):
                with context:
                    torch.testing.assert_close(model(input_ids=IDS).logits, expected)
        logits.append(expected)
    assert not applied  # without gradient there is nothing to save
    assert not any(torch.allclose(logits[i], logits[i - 1]) for i in range(3))


def dropout(model):
    model.train()
    torch.manual_seed(1)


def two_at_once(model):
    model.base_model.set_adapter(["default", "second"])


def merged(model):
    if not model.base_model.model.model.layers[0].self_attn.q_proj.merged:
        model.merge_adapter()


def trained_base(model):
    for p in model.parameters():
        p.requires_grad_(True)


@pytest.mark.parametrize("change", [dropout, two_at_once, merged, trained_base])
def test_everything_else_is_left_to_peft(change, applied):
    model = adapted(lora_dropout=0.5)
    change(model)
    expected = model(input_ids=IDS).logits
    change(model)
    with Kernels([model]).active():
        logits = model(input_ids=IDS).logits
    assert not applied
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_layers_of_other_kinds_are_not_replaced():
    assert list(lora.lora_layers(tiny_policy())) == []
    assert list(lora.lora_layers(adapted(use_dora=True)))  # known when it is called
    with Kernels([model := adapted(use_dora=True)]).active():
        assert model(input_ids=IDS).logits.isfinite().all()
