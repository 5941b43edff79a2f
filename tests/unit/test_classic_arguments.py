"""Which arguments and models the classic trainer takes and rejects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kedge.classic import PPOTrainer
from tests.classic_models import gpt2, letters, samples, t5, trainer

pytestmark = pytest.mark.filterwarnings("ignore:the KL to the reference")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": 3}, "config must be a kedge.classic.PPOConfig, got int"),
        ({"tokenizer": None}, "tokenizer must be a transformers tokenizer, got NoneType"),
        ({"model": gpt2()}, "model must be an AutoModelForCausalLMWithValueHead"),
        ({"ref_model": 3}, "ref_model must be a language model"),
        ({"dataset": [1]}, "dataset must be a datasets.Dataset"),
        ({"lr_scheduler": 3}, "lr_scheduler must be a torch"),
    ],
    ids=str,
)
def test_what_the_trainer_refuses(change: dict[str, Any], message: str) -> None:
    from kedge.classic import AutoModelForCausalLMWithValueHead, PPOConfig

    arguments = {
        "config": PPOConfig(batch_size=8, mini_batch_size=8),
        "model": AutoModelForCausalLMWithValueHead(gpt2()),
        "tokenizer": letters(),
    }
    with pytest.raises(ValueError, match=message):
        PPOTrainer(**arguments | change)


def test_both_reference_and_shared_layers() -> None:
    from kedge.classic import create_reference_model

    with pytest.warns(UserWarning, match="num_shared_layers is ignored"):
        trainer(gpt2(), num_shared_layers=1, reference=create_reference_model)


def test_kind_of_model_in_the_config() -> None:
    with pytest.raises(ValueError, match="is_encoder_decoder=True must be False"):
        trainer(gpt2(), is_encoder_decoder=True)
    assert trainer(t5()).config.is_encoder_decoder is True


def test_mixed_precision() -> None:
    from accelerate.state import AcceleratorState

    options = {"sgd": 0.1, "ppo_epochs": 1}
    a = trainer(gpt2(), **options).step(*samples())
    AcceleratorState._reset_state()
    try:
        rough = trainer(gpt2(), **options, accelerator_kwargs={"mixed_precision": "bf16"})
        b = rough.step(*samples())
    finally:
        AcceleratorState._reset_state()
    assert all(p.dtype == torch.float32 for p in rough.model.parameters())
    assert a["objective/entropy"] != b["objective/entropy"]
    assert a["objective/entropy"] == pytest.approx(b["objective/entropy"], rel=2e-2)


def test_the_precision_of_an_earlier_trainer_is_said_to_stay() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    try:
        Accelerator(cpu=True, mixed_precision="bf16")
        with pytest.warns(UserWarning, match="an earlier trainer .* mixed_precision='bf16'"):
            trainer(gpt2())
    finally:
        AcceleratorState._reset_state()


def test_a_model_on_several_devices_is_refused() -> None:
    model = gpt2()
    model.hf_device_map = {"transformer.h.0": 0, "transformer.h.1": 1}
    with pytest.raises(ValueError, match="device_map places the model on several devices"):
        trainer(model)
    model.hf_device_map = {"transformer.h.0": 0, "transformer.h.1": "cpu"}
    with pytest.raises(ValueError, match="device_map places parts of the model on cpu"):
        trainer(model)


def test_sharding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.classic.assembly.sharding_strategy", lambda accelerator: "weights")
    with pytest.raises(ValueError, match=r"requests FSDP or DeepSpeed, but kedge.classic keeps"):
        trainer(gpt2())
