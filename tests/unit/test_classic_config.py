"""The options of the classic trainer."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kedge.classic
from kedge.classic import PPOConfig
from kedge.errors import ConfigError

# As the documentation of TRL 0.11 gives them; None where the trainer fills it in.
DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "log_with": None,
    "task_name": None,
    "model_name": "gpt2",
    "query_dataset": "stanfordnlp/imdb",
    "reward_model": "sentiment-analysis:lvwerra/distilbert-imdb",
    "remove_unused_columns": True,
    "tracker_kwargs": {},
    "accelerator_kwargs": {},
    "project_kwargs": {},
    "tracker_project_name": "trl",
    "push_to_hub_if_best_kwargs": {},
    "steps": 20000,
    "learning_rate": 1.41e-05,
    "adap_kl_ctrl": True,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "target": 6.0,
    "horizon": 10000.0,
    "gamma": 1.0,
    "lam": 0.95,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "batch_size": 128,
    "forward_batch_size": None,
    "mini_batch_size": 128,
    "gradient_accumulation_steps": 1,
    "world_size": None,
    "ppo_epochs": 4,
    "max_grad_norm": None,
    "optimize_cuda_cache": None,
    "optimize_device_cache": False,
    "early_stopping": False,
    "target_kl": 1.0,
    "compare_steps": 1,
    "ratio_threshold": 10.0,
    "use_score_scaling": False,
    "use_score_norm": False,
    "score_clip": None,
    "whiten_rewards": False,
    "gradient_checkpointing": False,
    "is_encoder_decoder": None,
    "is_peft_model": None,
    "backward_batch_size": 128,
    "global_backward_batch_size": None,
    "global_batch_size": None,
    "dataset_num_proc": None,
}


def test_fields_and_defaults_are_those_of_the_seed() -> None:
    config = PPOConfig()
    own = {f.name: getattr(config, f.name) for f in fields(config)}
    assert own.pop("exp_name")
    assert own.pop("early_stopping_keeps_step") is False
    assert own == DEFAULTS


def test_order_of_the_fields_is_that_of_the_seed() -> None:
    names = [f.name for f in fields(PPOConfig)]
    assert names[0] == "exp_name"
    assert names[1:-1] == list(DEFAULTS)


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
        ({"ppo_epochs": 0}, "ppo_epochs=0 must be at least 1"),
        ({"target": 0.0}, "target=0.0 must be above 0"),
        ({"score_clip": -1.0}, "score_clip=-1.0 must be above 0 or None"),
        ({"push_to_hub_if_best_kwargs": {"private": True}}, "needs a repo_id"),
        ({"tracker_kwargs": "[1]"}, "a JSON object or None"),
        ({"tracker_kwargs": "{"}, "JSON object or None, but is not valid JSON: Exp"),
    ],
    ids=str,
)
def test_values_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 5}, "gamma=5 must be at most 1"),
        ({"lam": -1}, "lam=-1 must be at least 0"),
        ({"vf_coef": -1}, "vf_coef=-1 must be at least 0"),
        ({"init_kl_coef": -1}, "init_kl_coef=-1 must be at least 0"),
        ({"learning_rate": True}, "learning_rate=True must be a number"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a finite number"),
        ({"seed": "abc"}, "seed='abc' must be an integer"),
        ({"ppo_epochs": 1.5}, "ppo_epochs=1.5 must be an integer"),
        ({"whiten_rewards": "false"}, "whiten_rewards='false' must be True or False"),
        ({"use_score_scaling": 1}, "use_score_scaling=1 must be True or False"),
        ({"tracker_kwargs": {"wandb": 3}}, "'wandb' must be a dictionary of arguments"),
    ],
    ids=str,
)
def test_values_that_were_taken(change: dict[str, Any], message: str) -> None:
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
