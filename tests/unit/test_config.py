"""Configs: precision, stop tokens, values set afterwards, subclasses, and bad values."""

import copy
import math
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from accelerate import PartialState
from transformers import SchedulerType, TrainingArguments

from kedge import AsyncPPOConfig, GRPOConfig, PPOConfig, RLOOConfig
from kedge.config.declare import format_value
from kedge.errors import ConfigError, OptionError
from kedge.trainers.assembly.setup import build_sampling

BASES = {AsyncPPOConfig: {"rollout_engine": "embedded"}, RLOOConfig: {"token_level_kl": True}}


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
    try:
        with pytest.raises(
            ConfigError, match=f"2 processes were launched, but this one sees 1|{older}"
        ):
            config()
    finally:
        PartialState._reset_state()


def test_a_value_set_afterwards_is_checked_and_converted(config):
    made = config()
    made.stop_token_ids = (1, 2)
    checked = made.checked()
    checked.stop_token_ids = None
    assert (type(checked), made.stop_token_ids) == (PPOConfig, [1, 2])
    for name, value in {"response_length": 0, "lam": 7.0, "label_smoothing_factor": 0.1}.items():
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            setattr(made, name, value)


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


# -- options set after construction: read or refused, never ignored --------------------------------


@pytest.fixture
def changed(tmp_path):
    def make(cls, **changes):
        config = cls(output_dir=str(tmp_path), use_cpu=True, **BASES.get(cls, {}))
        for name, value in changes.items():
            setattr(config, name, value)
        return config.checked()

    return make


@pytest.mark.parametrize(
    ("cls", "option", "value", "problem"),
    [
        (GRPOConfig, "delta", 1.1, "delta=1.1 must be above 1 + epsilon_high=1.2"),
        (GRPOConfig, "kl_estimator", "full", "kl_estimator='full' needs the whole distribution"),
        (GRPOConfig, "steps_per_generation", 4, "steps_per_generation=4 is only read on constr"),
        (RLOOConfig, "ratio_level", "sequence", "needs one per response; set ratio_level='token'"),
        (RLOOConfig, "reward_clip_range", [2.0, 1.0], "must be low, high with low < high"),
        (RLOOConfig, "trl_defaults", "0.22", "trl_defaults='0.22' is only read on construction"),
        (AsyncPPOConfig, "async_mode", False, "async_mode=False is only read on construction"),
    ],
)
def test_what_construction_refuses_is_refused_later(changed, cls, option, value, problem):
    with pytest.raises(ConfigError) as error:
        changed(cls, **{option: value})
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("cls", "option", "value", "becomes"),
    [
        (GRPOConfig, "scale_rewards", True, {"scale_rewards": "group"}),
        (GRPOConfig, "scale_rewards", False, {"scale_rewards": "none"}),
        (GRPOConfig, "log_completions", False, {"num_sample_generations": 0}),
        (RLOOConfig, "temperature", None, {"temperature": 0.7}),
        (PPOConfig, "min_p", None, {"min_p": 0.0}),
        (AsyncPPOConfig, "kl_estimator", "kl2", {"kl_estimator": "k2"}),
        (AsyncPPOConfig, "stop_token", "period", {"stop_token": None, "stop_strings": ["."]}),
    ],
)
def test_values_are_converted_as_on_construction(changed, tmp_path, cls, option, value, becomes):
    given = {"output_dir": str(tmp_path), "use_cpu": True, **BASES.get(cls, {}), option: value}
    for config in (changed(cls, **{option: value}), cls(**given).checked()):
        assert {name: getattr(config, name) for name in becomes} == becomes


def test_the_checked_copy_leaves_the_config_alone(tmp_path):
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    config.scale_rewards = True
    assert config.checked().checked().scale_rewards == "group"
    assert config.scale_rewards is True


def test_copies_remember_what_construction_read(tmp_path):
    config = AsyncPPOConfig(output_dir=str(tmp_path), rollout_engine="embedded")
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        with pytest.raises(ConfigError, match="only read on construction"):
            copied.async_mode = False


def test_an_unknown_name_is_an_error_when_it_is_set(tmp_path):
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(OptionError, match="no option 'lam_vale'; the nearest is lam_value"):
        config.lam_vale = 0.9
    config._mine = 1
    assert config.device.type == "cpu"  # transformers keeps what it computes


# -- subclasses ------------------------------------------------------------------------------------


@dataclass
class Mixin:
    """Options of another program, checked before those of Kedge."""

    fp8: bool = False
    tags: list[str] = field(default_factory=list)
    plugin: Any = None

    def __post_init__(self) -> None:
        self.seen = self.fp8
        super().__post_init__()


@dataclass
class WithMixin(Mixin, GRPOConfig):
    """Adds fields from the left."""


@dataclass
class WithFields(PPOConfig):
    """Adds a field, and another default of a field and of an alias."""

    note: int = 3
    kl_coef: float = 0.5


@dataclass
class SmallBatches(GRPOConfig):
    """Another default of an option that becomes others."""

    steps_per_generation: int | None = 4


class WithConstructor(RLOOConfig):
    """Takes an argument that is not an option."""

    def __init__(self, *args: Any, note: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.note = note


@pytest.fixture
def base(tmp_path):
    return {"output_dir": str(tmp_path), "use_cpu": True}


def test_fields_of_a_subclass_belong_to_it(base):
    config = WithMixin(fp8=True, tags=["a"], plugin=len, max_completion_length=9, **base)
    assert config.seen is True
    checked = config.checked()
    assert (checked.fp8, checked.tags, checked.plugin) == (True, ["a"], len)
    assert checked.response_length == 9
    assert pickle.loads(pickle.dumps(config)).tags == ["a"]


def test_defaults_of_a_subclass_hold(base):
    config = WithFields(note=5, **base).checked()
    assert (config.note, config.kl_coef) == (5, 0.5)
    assert replace(config, note=6).note == 6
    config = SmallBatches(**base).checked()
    assert (config.gradient_accumulation_steps, config.num_mini_batches) == (4, 4)


def test_what_kedge_refuses_is_refused_in_a_subclass(base):
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1 is not supported"):
        WithMixin(label_smoothing_factor=0.1, **base)
    with pytest.raises(ConfigError, match="temperature=0 must be"):
        WithFields(temperature=0, **base)
    with pytest.raises(OptionError, match="WithFields has no option 'notes'"):
        WithFields(notes=1, **base)


def test_a_constructor_may_take_more_arguments(base):
    config = WithConstructor(note=7, rloo_k=4, **base)
    assert (config.note, config.num_generations, config.checked().note) == (7, 4, 7)
    with pytest.raises(OptionError, match="WithConstructor has no option 'notes'"):
        WithConstructor(notes=7, **base)


BAD = [
    ({"lam": 1.5}, "lam=1.5 must be at most 1"),
    ({"cliprange": 0}, "cliprange=0 must be above 0"),
    ({"temperature": "hot"}, "temperature='hot' must be a number"),
    ({"num_mini_batches": 0}, "num_mini_batches=0 must be at least 1"),
    ({"num_ppo_epochs": 1.5}, "num_ppo_epochs=1.5 must be an integer"),
    ({"min_p": 1.0}, "min_p=1.0 must be below 1"),
    ({"kl_estimator": "k4"}, "kl_estimator='k4' must be one of 'k1', 'k2', 'k3', 'abs' or 'full'"),
    ({"stop_token": "pad"}, "stop_token='pad' must be 'eos' or None"),
    ({"stop_token": None, "missing_eos_penalty": 1.0}, "nothing can end a response"),
    ({"stop_token": None, "non_eos_penalty": True}, 'Set stop_token="eos", or leave non_eos_pen'),
    ({"stop_token_ids": [-1]}, "stop_token_ids=[-1] must be at least 0 (item 0) or None"),
    ({"stop_strings": "end"}, "stop_strings='end' must be a list"),
    ({"min_new_tokens": 9, "response_length": 8}, "min_new_tokens=9 must be at most"),
    ({"non_eos_penalty": True, "missing_eos_penalty": 1.0}, "set one of them"),
    ({"on_reward_error": "score"}, "needs reward_error_score"),
    ({"reward_weights": ["a"]}, "reward_weights=['a'] must be a number, without quotes (item 0)"),
    ({"adaptive_kl": True, "kl_coef": 0.0}, "kl_coef=0 would stay 0"),
    ({"ref_adapter_name": "a", "model_adapter_name": "a"}, "the reference would be the policy"),
    ({"replay_rollouts": "/nowhere"}, "replay_rollouts='/nowhere' is not a folder"),
    ({"replay_rollouts": "/tmp", "max_lag": 1}, "max_lag=1 has no effect"),
    ({"optim": "galore_adamw"}, "optim='galore_adamw' is not supported"),
    ({"optim": "adafacto"}, "; the nearest is 'adafactor'"),
    ({"optim_args": "x"}, "optim_args='x' must be comma-separated name=value pairs"),
    ({"fsdp_config": "x"}, "the name of a JSON file, or JSON; the file does not exist"),
    ({"deepspeed": "x"}, "deepspeed='x' cannot be used"),
    ({"torch_compile_mode": "x"}, "torch_compile_mode='x' must be one of 'default', 'lite'"),
    ({"log_level": "loud"}, "log_level='loud' must be one of 'detail', 'debug'"),
    ({"warmup_steps": math.inf}, "warmup_steps=inf must be a finite number"),
    ({"save_rollouts": "a\0b"}, r"save_rollouts='a\x00b' must be a non-empty string"),
    ({"stop_strings": ["\ud800"]}, "without NUL characters or lone surrogates"),
    ({"total_episodes": 10**5000}, "total_episodes=a number of about 5001 digits must be"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end"),
]
if "greedy" in list(SchedulerType):  # not in early releases of transformers 5
    BAD += [({"lr_scheduler_type": "greedy"}, "lr_scheduler_type='greedy' is not supported")]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[format_value(o)[:60] for o, _ in BAD])
def test_a_bad_value_is_one_clear_error(tmp_path, options, message):
    with pytest.raises(ConfigError) as error:
        PPOConfig(**{"output_dir": str(tmp_path / "out"), **options})
    assert message in str(error.value)
