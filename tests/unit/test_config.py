"""PPOConfig: precision, values set afterwards, stop tokens."""

import os

import pytest
from accelerate import PartialState
from transformers import TrainingArguments

from kedge.config.ppo import PPOConfig
from kedge.config.sampling import build_sampling
from kedge.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    def make(**options):
        return PPOConfig(output_dir=str(tmp_path / "out"), **options)

    return make


def test_precision_on_a_cpu_is_never_an_error(config):
    assert config().bf16 is False
    assert config(bf16=True).bf16 is True
    with pytest.raises(ConfigError, match="fp16=True needs a CUDA device"):
        config(fp16=True)


def test_precision_on_a_gpu_is_bf16(config, monkeypatch):
    monkeypatch.setattr("kedge.config.base.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)
    monkeypatch.setattr(TrainingArguments, "distributed_state", None, raising=False)
    assert config().bf16 is True
    assert config(bf16=False).bf16 is False
    assert config(use_cpu=True).bf16 is False


def test_processes_that_do_not_find_one_another_are_an_error(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("kedge.config.base.is_torch_cuda_available", lambda: True)
    older = "MASTER_ADDR"  # accelerate, before it looked for a GPU
    before = set(os.environ)
    try:
        with pytest.raises(
            ConfigError, match=f"2 processes were launched, but this one sees 1|{older}"
        ):
            config()
    finally:
        PartialState._reset_state()
        for name in set(os.environ) - before:  # which early releases of accelerate set
            del os.environ[name]


def test_gradient_checkpointing_is_on_unless_turned_off(config):
    assert config().gradient_checkpointing is True
    assert config(gradient_checkpointing=False).gradient_checkpointing is False


def test_a_checked_config_is_a_copy(config):
    made = config()
    made.stop_token_ids = (1, 2)
    checked = made.checked()
    assert (type(checked), checked.stop_token_ids) == (PPOConfig, [1, 2])
    assert made.stop_token_ids == (1, 2)
    assert checked.to_dict() == made.to_dict() | {"stop_token_ids": [1, 2]}
    made.response_length = 0
    with pytest.raises(ConfigError, match="response_length=0 must be"):
        made.checked()


def test_a_value_set_afterwards_is_checked(config):
    made = config()
    made.lam = 7.0
    with pytest.raises(ConfigError, match=r"lam=7\.0"):
        made.checked()
    made = config()
    made.label_smoothing_factor = 0.1
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1"):
        made.checked()


def test_stop_tokens(config):
    def ids(eos=(7, 9), **options):
        return build_sampling(config(**options), eos).stop_ids

    assert ids() == ids(stop_token="eos") == (7, 9)
    assert ids(stop_token_id=0) == (7, 9, 0)
    assert ids(stop_token=None) == ()
    assert ids(stop_token=None, stop_token_ids=[5, 0], stop_token_id=5) == (5, 0)
    assert ids(stop_strings=["."]) == (7, 9)


def test_without_an_eos_token_a_run_says_that_nothing_ends_a_response(config, caplog):
    assert build_sampling(config(response_length=9), ()).stop_ids == ()
    assert "every response has response_length=9 tokens" in caplog.text
    caplog.clear()
    build_sampling(config(stop_token=None), (7,))
    build_sampling(config(stop_strings=["."]), ())
    assert caplog.text == ""


@pytest.mark.parametrize("options", [{"missing_eos_penalty": 1.0}, {"non_eos_penalty": True}])
def test_options_that_need_an_end_refuse_a_run_without_one(config, options):
    with pytest.raises(ConfigError, match=r"has an EOS token\. Set stop_token_ids or stop_str"):
        build_sampling(config(**options), ())
    build_sampling(config(**options), (7,))
    build_sampling(config(**options, stop_token=None, stop_strings=["."]), ())
