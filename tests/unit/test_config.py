"""PPOConfig: precision, values set afterwards, stop tokens."""

import os

import pytest
from accelerate import PartialState
from pydantic import TypeAdapter
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


def test_a_value_set_afterwards_is_checked_and_converted(config):
    made = config()
    made.stop_token_ids = (1, 2)
    checked = made.checked()
    checked.stop_token_ids = None
    assert (type(checked), made.stop_token_ids) == (PPOConfig, [1, 2])
    for name, value in {"response_length": 0, "lam": 7.0, "label_smoothing_factor": 0.1}.items():
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            setattr(made, name, value)


def test_types_are_checked_once(config, monkeypatch):
    checks = []
    validate = TypeAdapter.validate_python
    monkeypatch.setattr(
        TypeAdapter, "validate_python", lambda self, x: checks.append(x) or validate(self, x)
    )
    made = config(lam=0.5, response_length=9)
    made.checked().checked()
    assert len(checks) == 3  # with output_dir


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
