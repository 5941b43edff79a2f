"""PPOConfig: precision, values set afterwards, stop tokens, and resolve()."""

import math
from dataclasses import asdict

import pytest
from transformers import TrainingArguments

from kedge.config.ppo import PPOConfig
from kedge.config.resolve import resolve
from kedge.config.sampling import sampling_of
from kedge.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    def make(**options):
        return PPOConfig(output_dir=str(tmp_path / "out"), **options)

    return make


def test_precision_on_a_cpu_is_never_an_error(config):
    assert config().bf16 is False
    assert resolve(config()).learner.precision == "no"
    assert resolve(config(bf16=True)).learner.precision == "bf16"
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
    with pytest.raises(ConfigError, match="2 processes were launched, but this one sees 1"):
        config()


def test_gradient_checkpointing_is_on_unless_turned_off(config):
    assert resolve(config()).learner.gradient_checkpointing is True
    assert resolve(config(gradient_checkpointing=False)).learner.gradient_checkpointing is False
    kwargs = {"use_reentrant": False}
    made = resolve(config(gradient_checkpointing_kwargs=kwargs)).learner
    assert made.gradient_checkpointing_kwargs == kwargs


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


def test_a_value_set_afterwards_is_checked_by_resolve(config):
    made = config()
    made.lam = 7.0
    with pytest.raises(ConfigError, match=r"lam=7\.0"):
        resolve(made)
    made = config()
    made.label_smoothing_factor = 0.1
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1"):
        resolve(made)


def test_a_single_value_cannot_be_whitened(config):
    one = {"per_device_train_batch_size": 1, "response_length": 1}
    with pytest.raises(ConfigError, match="whiten_advantages=True needs a batch of at least 2"):
        resolve(config(**one))
    assert resolve(config(**one), world_size=2).batch.world_size == 2
    assert resolve(config(**one, whiten_advantages=False)).ppo.whiten_advantages is False


def test_stop_tokens(config):
    def ids(eos=(7, 9), **options):
        return sampling_of(config(**options), eos).stop_ids

    assert ids() == ids(stop_token="eos") == (7, 9)
    assert ids(stop_token_id=0) == (7, 9, 0)
    assert ids(stop_token=None) == ()
    assert ids(stop_token=None, stop_token_ids=[5, 0], stop_token_id=5) == (5, 0)
    assert ids(stop_strings=["."]) == (7, 9)


def test_without_an_eos_token_a_run_says_that_nothing_ends_a_response(config, caplog):
    assert sampling_of(config(response_length=9), ()).stop_ids == ()
    assert "every response has response_length=9 tokens" in caplog.text
    caplog.clear()
    sampling_of(config(stop_token=None), (7,))
    sampling_of(config(stop_strings=["."]), ())
    assert caplog.text == ""


@pytest.mark.parametrize("options", [{"missing_eos_penalty": 1.0}, {"non_eos_penalty": True}])
def test_options_that_need_an_end_refuse_a_run_without_one(config, options):
    with pytest.raises(ConfigError, match=r"has an EOS token\. Set stop_token_ids or stop_str"):
        resolve(config(**options))
    resolve(config(**options), eos_token_ids=(7,))
    resolve(config(**options, stop_token=None, stop_strings=["."]))


def test_the_two_penalties_keep_their_meanings(config):
    subtracts = resolve(config(missing_eos_penalty=2.0), eos_token_ids=(7,)).reward
    assert (subtracts.missing_stop, subtracts.penalty) == ("subtract", 2.0)
    older = resolve(config(non_eos_penalty=True), eos_token_ids=(7,)).reward
    assert (older.missing_stop, older.penalty) == ("replace", -1.0)
    assert resolve(config()).reward.missing_stop == "keep"
    assert resolve(config(missing_eos_penalty=0.0)).reward.missing_stop == "subtract"


def test_what_reaches_the_algorithm_is_what_it_takes(config):
    from kedge.algorithms import ppo

    made = ppo(**asdict(resolve(config(kl_estimator="full", lam=0.9)).ppo))
    assert made.needs_full_kl


def test_unset_values_follow_the_others(config):
    made = resolve(config(learning_rate=1e-3, seed=3))
    assert (made.value.learning_rate, made.data.seed) == (1e-3, 3)
    made = resolve(config(learning_rate=1e-3, value_learning_rate=0.0, seed=3, data_seed=0))
    assert (made.value.learning_rate, made.data.seed) == (0.0, 0)
    assert resolve(config(max_grad_norm=0.0)).learner.max_grad_norm == math.inf
