"""The options of the classic trainer, and which arguments and models it takes."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kedge.classic
from kedge.classic import PPOConfig, PPOTrainer
from kedge.errors import ConfigError
from tests.classic_models import gpt2, letters, samples, t5, trainer

# As the documentation of TRL 0.11 gives them; null where the trainer fills it in.
DEFAULTS: dict[str, Any] = json.loads(
    Path(__file__).with_name("classic_config_defaults.json").read_text()
)


def test_fields_and_defaults_are_those_of_the_seed_in_their_order() -> None:
    own = {f.name: getattr(PPOConfig(), f.name) for f in fields(PPOConfig)}
    assert own.pop("exp_name")
    assert own.pop("early_stopping_keeps_step") is False
    assert list(own.items()) == list(DEFAULTS.items())


def test_sizes() -> None:
    config = PPOConfig(batch_size=12, mini_batch_size=2, gradient_accumulation_steps=3, steps=100)
    assert config.backward_batch_size == 6
    assert config.total_ppo_epochs == 9  # ceil(100 / 12)
    with pytest.raises(ValueError, match=r"batch_size=8 must be a multiple of mini_batch_size=3 x"):
        PPOConfig(batch_size=8, mini_batch_size=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_penalty": "k3"}, "kl_penalty='k3' must be one of 'kl', 'abs', 'mse' or 'full'"),
        ({"log_with": "neptune"}, "log_with='neptune' must be one of all, aim, tensorboard, wandb"),
        ({"score_clip": -1.0}, "score_clip=-1.0 must be above 0 or None"),
        ({"push_to_hub_if_best_kwargs": {"private": True}}, "needs a repo_id"),
        ({"tracker_kwargs": "[1]"}, "a JSON object or None"),
        ({"tracker_kwargs": "{"}, "JSON object or None, but is not valid JSON: Exp"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a finite number"),
        ({"whiten_rewards": "false"}, "whiten_rewards='false' must be True or False"),
        ({"tracker_kwargs": {"wandb": 3}}, "'wandb' must be a dictionary of arguments"),
    ],
    ids=str,
)
def test_values_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**change)


def test_numbers_of_numpy_and_whole_floats_are_numbers() -> None:
    config = PPOConfig(batch_size=np.int64(8), mini_batch_size=4.0, gamma=np.float32(0.5))
    assert (config.batch_size, config.mini_batch_size, config.gamma) == (8, 4, 0.5)
    assert isinstance(config.mini_batch_size, int)


def test_every_tracker_of_accelerate_is_known() -> None:
    from accelerate.utils import LoggerType

    for name in map(str, LoggerType):
        if find_spec(name) is None and name != "all":
            with pytest.raises(ImportError, match=f"pip install {name}"):
                PPOConfig(log_with=name)
        else:
            PPOConfig(log_with=name)


def test_deprecated_names_do_what_they_did() -> None:
    with pytest.warns(UserWarning, match="forward_batch_size is deprecated"):
        assert PPOConfig(forward_batch_size=4, batch_size=8).mini_batch_size == 4
    with pytest.warns(UserWarning, match="optimize_cuda_cache is deprecated"):
        assert PPOConfig(optimize_cuda_cache=True).optimize_device_cache


def test_on_a_command_line() -> None:
    from transformers import HfArgumentParser

    (config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(
        [
            *("--batch_size", "8", "--mini_batch_size", "4", "--kl_penalty", "abs"),
            *("--tracker_kwargs", '{"wandb": {"name": "mine"}}', "--early_stopping"),
        ]
    )
    assert (config.batch_size, config.kl_penalty, config.early_stopping) == (8, "abs", True)
    assert config.options("tracker_kwargs") == {"wandb": {"name": "mine"}}
    assert config.to_dict()["tracker_kwargs/wandb/name"] == "mine"


# Told to trackers and the model card; made by the config; older names of others.
TOLD = {"exp_name", "task_name", "model_name", "query_dataset", "reward_model"}
MADE = {"global_backward_batch_size", "global_batch_size"}
MADE |= {"steps", "gradient_accumulation_steps"}  # total_ppo_epochs, backward_batch_size
OLDER = {"forward_batch_size", "optimize_cuda_cache"}


def test_every_field_is_read_somewhere() -> None:
    folder = Path(kedge.classic.__file__).parent
    source = "".join(p.read_text() for p in folder.glob("*.py") if p.name != "config.py")
    told = PPOConfig().to_dict()
    for field in fields(PPOConfig):
        name = field.name
        read = re.search(rf"\b(config|c)\.{name}\b|options\(\"{name}\"\)", source)
        assert read or name in TOLD | MADE | OLDER, name
        assert name in told or getattr(PPOConfig(), name) == {}


@pytest.mark.filterwarnings("ignore:the KL to the reference")
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


@pytest.mark.filterwarnings("ignore:the KL to the reference")
def test_both_reference_and_shared_layers() -> None:
    from kedge.classic import create_reference_model

    with pytest.warns(UserWarning, match="num_shared_layers is ignored"):
        trainer(gpt2(), num_shared_layers=1, reference=create_reference_model)


@pytest.mark.filterwarnings("ignore:the KL to the reference")
def test_kind_of_model_in_the_config() -> None:
    with pytest.raises(ValueError, match="is_encoder_decoder=True must be False"):
        trainer(gpt2(), is_encoder_decoder=True)
    assert trainer(t5()).config.is_encoder_decoder is True


@pytest.mark.filterwarnings("ignore:the KL to the reference")
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


@pytest.mark.filterwarnings("ignore:the KL to the reference")
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


@pytest.mark.filterwarnings("ignore:the KL to the reference")
def test_a_model_on_several_devices_is_refused() -> None:
    model = gpt2()
    model.hf_device_map = {"transformer.h.0": 0, "transformer.h.1": 1}
    with pytest.raises(ValueError, match="device_map places the model on several devices"):
        trainer(model)
    model.hf_device_map = {"transformer.h.0": 0, "transformer.h.1": "cpu"}
    with pytest.raises(ValueError, match="device_map places parts of the model on cpu"):
        trainer(model)


@pytest.mark.filterwarnings("ignore:the KL to the reference")
def test_sharding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.classic.assembly.sharding_strategy", lambda accelerator: "weights")
    with pytest.raises(ValueError, match=r"requests FSDP or DeepSpeed, but kedge.classic keeps"):
        trainer(gpt2())
