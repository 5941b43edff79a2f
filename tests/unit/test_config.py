"""Configs: precision, stop tokens, values set afterwards, subclasses, bad and odd values.

Every odd value of every field is accepted as meaningful, or refused by name.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from accelerate import PartialState
from transformers import SchedulerType, TrainingArguments

from kedge import AsyncPPOConfig, GRPOConfig, PPOConfig, RLOOConfig
from kedge.cli.options import ModelArguments, ScriptArguments
from kedge.config.declare import NoEffect, Unsupported, format_value, status
from kedge.config.dialect import Alias
from kedge.config.rollout_engines import assume_all_packages
from kedge.ext.before_rl.reward_command import RewardArguments
from kedge.ext.trl import classic, options, ppov2
from kedge.records.errors import ConfigError, KedgeError, OptionError
from kedge.trainers.options import sampling_options
from tests.e2e.small import small

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
    assert (type(checked), made.stop_token_ids, checked.stop_token_ids) == (
        PPOConfig,
        (1, 2),
        [1, 2],
    )
    for name, value in {"response_length": 0, "lam": 7.0, "label_smoothing_factor": 0.1}.items():
        changed = copy.copy(made)
        setattr(changed, name, value)
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            changed.checked()


def test_stop_tokens(config):
    def ids(eos=(7, 9), **given):
        return sampling_options(config(**given), eos).stop_ids

    assert ids() == ids(stop_token="eos") == (7, 9)
    assert ids(stop_token_ids=[0]) == (7, 9, 0)
    assert ids(stop_token=None) == ()
    assert ids(stop_token=None, stop_token_ids=[5, 0, 5]) == (5, 0)
    with pytest.raises(OptionError, match="'stop_token_id'; it is called stop_token_ids here"):
        config(stop_token_id=0)
    assert options.PPOConfig(use_cpu=True, stop_token_id=0).stop_token_ids == [0]
    assert ids(stop_strings=["."]) == (7, 9)


def test_without_an_eos_token_a_run_says_that_nothing_ends_a_response(config, caplog):
    assert sampling_options(config(response_length=9), ()).stop_ids == ()
    assert "every response has response_length=9 tokens" in caplog.text
    caplog.clear()
    sampling_options(config(stop_token=None), (7,))
    sampling_options(config(stop_strings=["."]), ())
    assert caplog.text == ""


@pytest.mark.parametrize("options", [{"missing_eos_penalty": 1.0}, {"non_eos_penalty": True}])
def test_options_that_need_an_end_refuse_a_run_without_one(config, options):
    with pytest.raises(ConfigError, match=r"has an EOS token\. Set stop_token_ids or stop_str"):
        sampling_options(config(**options), ())
    sampling_options(config(**options), (7,))
    sampling_options(config(**options, stop_token=None, stop_strings=["."]), ())


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
        (options.GRPOConfig, "steps_per_generation", 0, "steps_per_generation=0 must be at least"),
        (RLOOConfig, "ratio_level", "sequence", "needs one per response; set ratio_level='token'"),
        (RLOOConfig, "reward_clip_range", [2.0, 1.0], "must be low, high with low < high"),
        (AsyncPPOConfig, "async_mode", False, "async_mode=False means max_lag=0, but max_lag=1 is"),
    ],
)
def test_what_construction_refuses_is_refused_later(changed, cls, option, value, problem):
    with pytest.raises(ConfigError) as error:
        changed(cls, **{option: value})
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("cls", "option", "value", "becomes"),
    [
        (options.GRPOConfig, "scale_rewards", True, {"scale_rewards": "group"}),
        (options.GRPOConfig, "scale_rewards", False, {"scale_rewards": "none"}),
        (options.GRPOConfig, "log_completions", False, {"num_sample_generations": 0}),
        (options.RLOOConfig, "steps_per_generation", 4, {"num_mini_batches": 4}),
        (AsyncPPOConfig, "kl_estimator", "kl2", {"kl_estimator": "k2"}),
        (AsyncPPOConfig, "stop_token", "period", {"stop_token": None, "stop_strings": ["."]}),
    ],
)
def test_values_are_converted_as_on_construction(changed, tmp_path, cls, option, value, becomes):
    given = {"output_dir": str(tmp_path), "use_cpu": True, **BASES.get(cls, {}), option: value}
    for config in (changed(cls, **{option: value}), cls(**given).checked()):
        assert {name: getattr(config, name) for name in becomes} == becomes


def test_a_misspelled_name_that_is_set_stops_the_trainer(tmp_path):
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True)
    config.lam_vale = 0.9
    with pytest.raises(OptionError, match="no option 'lam_vale'; the nearest is lam_value"):
        config.checked()
    del config.lam_vale
    config.mine = config._mine = 1
    assert config.checked().mine == 1
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
class WithMixin(Mixin, options.GRPOConfig):
    """Adds fields from the left."""


@dataclass
class WithFields(PPOConfig):
    """Adds a field, and another default of a field."""

    note: int = 3
    kl_coef: float = 0.5


@dataclass
class SmallBatches(options.GRPOConfig):
    """Other defaults of an option that becomes others, and of a name of TRL."""

    steps_per_generation: int | None = 4
    max_completion_length: int = 17


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
    assert config.response_length == config.max_completion_length == 17


def test_what_kedge_refuses_is_refused_in_a_subclass(base):
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1 is not supported"):
        WithMixin(label_smoothing_factor=0.1, **base)
    with pytest.raises(ConfigError, match="temperature=0 must be"):
        WithFields(temperature=0, **base)
    with pytest.raises(OptionError, match="WithFields has no option 'notes'"):
        WithFields(notes=1, **base)


def test_a_constructor_may_take_more_arguments(base):
    config = WithConstructor(note=7, num_generations=4, **base)
    assert (config.note, config.num_generations, config.checked().note) == (7, 4, 7)
    with pytest.raises(OptionError, match="WithConstructor has no option 'notes'"):
        WithConstructor(notes=7, **base)


BAD = [
    ({"lam": 1.5}, "lam=1.5 must be at most 1"),
    ({"cliprange": 0}, "cliprange=0 must be above 0"),
    ({"num_mini_batches": 0}, "num_mini_batches=0 must be at least 1"),
    ({"min_p": 1.0}, "min_p=1.0 must be below 1"),
    ({"stop_token": "pad"}, "stop_token='pad' must be 'eos' or None"),
    ({"stop_token": None, "missing_eos_penalty": 1.0}, "nothing can end a response"),
    ({"stop_token": None, "non_eos_penalty": True}, 'Set stop_token="eos", or leave non_eos_pen'),
    ({"stop_token_ids": [-1]}, "stop_token_ids=[-1] must be at least 0 (item 0) or None"),
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


class Thing:
    def __repr__(self) -> str:
        raise RuntimeError("no representation")


VALUES: dict[str, Callable[[], Any]] = {
    **{str(x): lambda x=x: x for x in (math.nan, math.inf, -math.inf, -1, -0.5, 0, 0.5, 3, 1e308)},
    **{str(x): lambda x=x: x for x in (2**64, 2.5, True, False, None)},
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,  # Python refuses to print it
    **{repr(x): lambda x=x: x for x in ("3", "false", "", "x", "\ud800", "a\0b", b"x")},
    "long": lambda: "x" * 5000,  # longer than a file name may be
    **{repr(x): lambda x=x: list(x) for x in ([], [1], ["x"], ["\ud800"], [math.nan])},
    "tuple": lambda: (1, 2, 3),
    **{repr(x): lambda x=x: dict(x) for x in ({}, {"a": 1}, {1: 2})},
    "set": lambda: {1},
    "thing": Thing,
    "function": lambda: len,
    "class": lambda: int,
}

# Fields in which a number below 0, or an infinite one, means something.
SIGNED = {
    *("max_steps", "local_rank", "save_freq"),
    *(
        "penalty_reward_value",
        "reward_error_score",
        "env_error_score",
        "eval_success_score",
        "reward_weights",
    ),
    *("reward_model_multiplier", "verification_reward", "r1_style_format_reward"),
}
UNBOUNDED = {
    *("cliprange", "cliprange_value", "cliprange_high", "epsilon", "epsilon_high"),
    *("max_grad_norm", "sampler_correction_high", "score_clip"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    *("target_kl", "ratio_threshold"),
}
# What Python may give in addition to what the annotation says.
BESIDE: dict[str, Any] = {
    "fsdp": bool | list[str],
    "resume_from_checkpoint": bool,
    "max_grad_norm": type(None),
    "debug": type(None),
    "scale_rewards": bool,
    "reward_clip_range": float,
}
MAY_BE_EMPTY = ("fsdp", "debug")  # whose default is or was the empty text

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "ppo": (PPOConfig, {"output_dir": "out"}),
    "rloo": (RLOOConfig, {"output_dir": "out"}),
    "grpo": (GRPOConfig, {"output_dir": "out"}),
    "trl-ppo": (ppov2.PPOv2Config, {"output_dir": "out"}),
    "trl-rloo": (options.RLOOConfig, {"output_dir": "out"}),
    "trl-grpo": (options.GRPOConfig, {"output_dir": "out"}),
    "async": (AsyncPPOConfig, {"output_dir": "out"}),
    "script": (ScriptArguments, {}),
    "model": (ModelArguments, {}),
    "reward": (RewardArguments, {}),
    "classic": (classic.PPOConfig, {"exp_name": "x"}),
}


def meaningful(hint: Any, value: Any, name: str) -> bool:
    """Whether a field of this type can mean something by the value."""
    args, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in args)
    if origin in (list, dict) or hint in (list, dict):
        if not isinstance(value, list | tuple if (origin or hint) is list else dict):
            return False
        inner = args[0] if args else Any
        return inner is Any or all(meaningful(inner, each, name) for each in value)
    if args:
        return any(meaningful(a, value, name) for a in args)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in [member.value for member in hint]
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        allowed = type(value) in kinds and (value >= 0 or name in SIGNED) and value > -math.inf
        return allowed and (abs(value) <= 2**64 or (value == math.inf and name in UNBOUNDED))
    if hint is str:
        writable = isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value)
        return writable and (value != "" or name in MAY_BE_EMPTY)
    return type(value) is hint


def cases(cls: type) -> Iterator[tuple[Field[Any], str, Any]]:
    known = {f.name for f in fields(PPOConfig)} if cls is not PPOConfig else set()
    for each in fields(cls):
        if each.name in known:  # judged in PPOConfig
            continue
        for shown, make in VALUES.items():
            if each.init:
                yield each, shown, make()


def judged(cls: type, base: dict[str, Any], field: Field[Any], hint: Any, value: Any) -> str | None:
    """What is wrong with how the config takes the value."""
    try:
        cls(**base | {field.name: value})
    except KedgeError as error:
        return _unclear(str(error), cls, field.name, value)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    entry = status(cls, field.name) if hasattr(cls, "STATUS") else None
    if isinstance(entry, NoEffect) and not isinstance(entry, Unsupported):
        return None  # without effect, and a warning says so
    if isinstance(entry, Unsupported) and not entry.acts(value, field.default):
        return None  # the default
    if isinstance(entry, Alias) and (entry.convert or value is False):
        return None  # False may be how the name is left out
    beside = BESIDE.get(field.name, Literal["no such"])
    if not (meaningful(hint, value, field.name) or meaningful(beside, value, field.name)):
        return "is accepted"
    return None


def _unclear(message: str, cls: type, name: str, value: Any) -> str | None:
    target = getattr(getattr(cls, "STATUS", {}).get(name), "target", name)
    if not re.search(rf"(?<!\w)({name}|{target})=", message):
        return f"is refused without its name: {message}"
    secret = name in ("hub_token", "push_to_hub_token")
    if isinstance(value, Thing) or secret or (isinstance(value, int) and value >= 2**64):
        return None
    forms = (value, [*value], [*map(float, value)]) if isinstance(value, tuple) else (value,)
    if "\n" in message or not any(repr(each)[:60] in message for each in forms):
        return f"is refused without its value: {message}"
    return None


@pytest.mark.filterwarnings("ignore:.* is deprecated")
@pytest.mark.parametrize("name", CONFIGS)
def test_each_odd_value_is_meaningful_or_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cls, base = CONFIGS[name]
    hints = get_type_hints(cls)
    wrong = []
    with assume_all_packages():  # options of Ray and vLLM are judged without them
        for field, shown, value in cases(cls):
            what = judged(cls, base, field, hints[field.name], value)
            if what is not None:
                wrong.append(f"{field.name}={shown} {what}")
    assert not wrong, "\n".join(wrong)


def test_values_of_other_types_that_mean_the_same_are_converted(tmp_path: Path) -> None:
    import numpy as np

    made = PPOConfig(
        output_dir=tmp_path,
        total_episodes=1e4,
        seed=np.int64(3),
        learning_rate=np.float32(0.5),
        stop_token_ids=(1, 2),
        kl_coef=2**64,
    )
    assert (made.output_dir, made.stop_token_ids) == (str(tmp_path), [1, 2])
    numbers = (made.total_episodes, made.seed, made.learning_rate, made.kl_coef)
    assert numbers == (10_000, 3, 0.5, 2**64)
    assert [type(x) for x in numbers] == [int, int, float, float]


def test_a_field_keeps_its_range_where_a_subclass_changes_its_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"temperature=0 must be at least 0\.000001"):
        RLOOConfig(output_dir=str(tmp_path), temperature=0)


def test_runs_of_no_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_steps=0 must be at least 1, or -1 for no limit"):
        small(output_dir=str(tmp_path), total_episodes=None, max_steps=0)


def test_tokens_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hub_token=<list> must be a string") as error:
        PPOConfig(output_dir=str(tmp_path), hub_token=["hf_secret"])
    assert "hf_secret" not in str(error.value)
