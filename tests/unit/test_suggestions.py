"""A keyword that there is not is named with the one that was meant."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields
from typing import Any

import pytest

import kedge
from kedge import classic
from kedge.cli.arguments import parse
from kedge.config.base import foreign
from kedge.config.rollout_engines import assume_all_packages
from kedge.errors import ConfigError, OptionError
from kedge.suggestions import ALIASES

CONFIGS: list[type[Any]] = [
    *(kedge.PPOConfig, kedge.PPOv2Config, kedge.RLOOConfig, kedge.GRPOConfig),
    *(kedge.AsyncPPOConfig, classic.PPOConfig),
]
TRAINERS: list[type[Any]] = [
    *(kedge.PPOTrainer, kedge.PPOv2Trainer, kedge.RLOOTrainer, kedge.GRPOTrainer),
    *(kedge.AsyncPPOTrainer, classic.PPOTrainer),
]


def said(make: type[Any], name: str) -> str:
    # What Python raises, and scripts may catch; Ray need not be here.
    with assume_all_packages(), pytest.raises(TypeError) as raised:
        make(**{name: 1})
    assert isinstance(raised.value, ConfigError)
    assert isinstance(raised.value, OptionError)
    return str(raised.value)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_the_nearest_option_is_named(config: type[Any]) -> None:
    name = config.__name__
    assert said(config, "lerning_rate") == (
        f"{name} has no option 'lerning_rate'; the nearest is learning_rate"
    )
    assert said(config, "qqqqqqq") == f"{name} has no option 'qqqqqqq'"


@pytest.mark.parametrize(
    ("config", "name", "here"),
    [
        (kedge.PPOConfig, "ppo_epochs", "num_ppo_epochs"),
        (kedge.PPOConfig, "init_kl_coef", "kl_coef"),
        (kedge.PPOConfig, "max_completion_length", "response_length"),
        (kedge.PPOConfig, "evaluation_strategy", "eval_strategy"),
        (kedge.RLOOConfig, "log_with", "report_to"),
        (kedge.GRPOConfig, "rloo_k", "num_generations"),
        (kedge.GRPOConfig, "cliprange", "epsilon"),
        (classic.PPOConfig, "num_ppo_epochs", "ppo_epochs"),
        (classic.PPOConfig, "kl_coef", "init_kl_coef"),
        (classic.PPOConfig, "report_to", "log_with"),
    ],
)
def test_what_is_called_otherwise_is_named(config: type[Any], name: str, here: str) -> None:
    assert (
        said(config, name) == f"{config.__name__} has no option {name!r}; it is called {here} here"
    )


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_arguments_of_trainers(trainer: type[Any]) -> None:
    name = trainer.__name__
    assert said(trainer, "modl") == f"{name} has no argument 'modl'; the nearest is model"
    assert said(trainer, "learning_rate") == (
        f"{name} has no argument 'learning_rate'; it is an option of the config"
    )


def test_older_arguments_of_trainers() -> None:
    with pytest.raises(ConfigError, match="policy and model are the older and the newer name"):
        kedge.RLOOTrainer(policy="a", model="b")
    want = "PPOTrainer has no argument 'tokenizer'; it is called processing_class here"
    assert said(kedge.PPOTrainer, "tokenizer") == want


def test_flags_that_are_arguments_of_trainers() -> None:
    for flag, here in (
        ("--model", "model_name_or_path"),
        ("--dataset", "dataset_name"),
        ("--lr", "learning_rate"),
        ("--lora_rank", "lora_r"),
        ("--critic_lr", "value_learning_rate"),
        ("--epochs", "num_train_epochs"),
        ("--rollout.n", "num_generations"),
    ):
        with pytest.raises(ConfigError, match=f"unknown flag {flag}; it is called --{here} here"):
            parse([flag, "x"], prog="kedge ppo")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_a_config_stays_a_dataclass(config: type[Any]) -> None:
    signature = inspect.signature(config)
    assert [*signature.parameters] == [f.name for f in fields(config) if f.init]
    with assume_all_packages():
        made = config(learning_rate=0.25)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.learning_rate == 0.25


def test_a_name_is_in_one_group_and_every_group_has_one_of_ours() -> None:
    names = [name for group in ALIASES for name in group]
    assert len(names) == len(set(names))
    known = {n for made in (*CONFIGS, *TRAINERS) for n in inspect.signature(made).parameters}
    known |= {name for made in CONFIGS for name in foreign(made)} | {"lora_r"}
    assert [group for group in ALIASES if not known & set(group)] == []


def test_a_warning_of_an_older_name_points_at_the_script() -> None:
    with pytest.warns(UserWarning, match="forward_batch_size is deprecated") as caught:
        classic.PPOConfig(forward_batch_size=4, batch_size=8)
    assert caught[0].filename == __file__
