"""Names of options: of Kedge, TrainingArguments, other libraries and releases; what was meant."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import HfArgumentParser, TrainingArguments

import kedge
from kedge import AsyncPPOConfig, GRPOConfig, PPOConfig, RLOOConfig
from kedge.cli.arguments import parse
from kedge.config.declare import Count, NoEffect, Unsupported, default_of, option, status
from kedge.config.dialect import Alias
from kedge.config.inherited import STATUS
from kedge.config.rollout_engines import assume_all_packages
from kedge.ext.trl import classic, names, options, v0_17
from kedge.ext.trl.scripts import ScriptParser
from kedge.records.errors import ConfigError, OptionError
from kedge.suggestions import TRAINER_ARGUMENTS
from kedge.trainers.spec import SharedArguments

PRINTED = json.loads((Path(__file__).parent / "ppo_config_defaults.json").read_text())
FIELDS = {f.name: f for f in fields(options.PPOConfig)}
CONFIGS = [PPOConfig, RLOOConfig, GRPOConfig]
DIALECTS = [
    *(v0_17.PPOv2Config, v0_17.RLOOConfig, options.RLOOConfig, options.GRPOConfig),
    AsyncPPOConfig,
]


@pytest.fixture(autouse=True)
def everything_is_installed():
    with assume_all_packages():
        yield


@pytest.fixture
def config(tmp_path):
    def make(cls=PPOConfig, **options):
        return cls(output_dir=str(tmp_path / "out"), use_cpu=True, **options)

    return make


def away(default):
    """Some value that is not the default."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return ["x"] if isinstance(default, list) else f"{default}x"


def names_of(kind):
    """Fields and other names of every config whose status is of this kind, with their defaults."""
    cases = {}
    for cls in (PPOConfig, *DIALECTS):
        for f in fields(cls):
            if type(entry := status(cls, f.name)) is kind:
                cases.setdefault(f.name, (cls, f.name, entry, default_of(f)))
    return [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in cases.values()]


# Fields that newer releases of transformers 5 dropped, such as warmup_ratio, change these lists.
newest = pytest.mark.skipif(
    "warmup_ratio" in TrainingArguments.__dataclass_fields__, reason="an early transformers 5"
)

# -- defaults and tables --------------------------------------------------------------------------


@newest
@pytest.mark.parametrize("name", PRINTED)
def test_every_printed_parameter_has_its_printed_default(name):
    default = default_of(FIELDS[name])
    if name == "include_num_input_tokens_seen":  # spelled "no" by now
        assert default in (False, "no")
    elif name == "stop_token":  # printed as None; responses end at EOS unless asked otherwise
        assert default == "eos"
    else:
        assert default == PRINTED[name]
        assert isinstance(default, bool) == isinstance(PRINTED[name], bool)


def test_the_printed_signature_is_whole(config):
    assert len(PRINTED) == 164
    derived = {"world_size", "output_dir", "bf16", "include_num_input_tokens_seen", "use_cpu"}
    given = {name: value for name, value in PRINTED.items() if name not in derived}
    config(options.PPOConfig, **given)


@newest
@pytest.mark.parametrize("cls", CONFIGS)
def test_every_field_has_a_help_text_and_a_place(cls):
    inherited = {f.name for f in fields(TrainingArguments)}
    assert [f.name for f in fields(cls) if not f.metadata.get("help")] == []
    own = {f.name for f in fields(cls)} - inherited  # only fields of transformers may do nothing
    assert [name for name in own if not isinstance(status(cls, name), str)] == []
    assert inherited - STATUS.keys() == set()


# Read by transformers itself, in the file named, or acting by being accepted.
ELSEWHERE = {
    **dict.fromkeys(("tf32", "log_on_each_node", "ddp_backend", "ddp_timeout"), "training_args.py"),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), "training_args.py"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), "trainer.py"),
    "accelerator_config": "training_args.py",
    **dict.fromkeys(("eval_strategy", "logging_first_step", "eval_delay"), "trainer_callback.py"),
    **dict.fromkeys(("eval_steps", "save_steps"), "training_args.py"),
    "project": "integrations/integration_utils.py",
    "trackio_space_id": "integrations/integration_utils.py",
    "trackio_bucket_id": "integrations/integration_utils.py",
    "trackio_static_space_id": "integrations/integration_utils.py",
    "logging_dir": "integrations/integration_utils.py",
    "local_rank": None,
    **dict.fromkeys(("num_total_batches", "local_batch_size", "local_mini_batch_size"), None),
}


@newest
@pytest.mark.parametrize("cls", CONFIGS)
def test_every_field_that_acts_is_read_somewhere(cls):
    root = Path(kedge.__file__).parent
    text = "\n".join(p.read_text() for p in root.rglob("*.py"))
    used = {*re.findall(r"\b(?:args|_args|config|self|c|options|value)(?=\.(\w+))", text)}
    used |= {*re.findall(r'getattr\((?:config|args|self\.args), "(\w+)"', text)}
    missing = []
    for f in fields(cls):
        if not isinstance(status(cls, f.name), str):
            continue
        where = ELSEWHERE.get(f.name, "")
        if where:
            theirs = (Path(transformers.__file__).parent / where).read_text()
            read = re.search(rf"\b(args|self)\.{f.name}\b", theirs)
        else:
            read = where is None or f.name in used
        if not read:
            missing.append(f.name)
    assert missing == []


# -- names that are not supported -----------------------------------------------------------------


@pytest.mark.parametrize(("cls", "name", "entry", "default"), names_of(Unsupported))
def test_an_unsupported_name_passes_at_its_default_alone(config, cls, name, entry, default, caplog):
    assert entry.reason
    assert entry.way_out
    made = config(cls, **{name: default})
    assert f"{name}=" not in caplog.text
    assert getattr(made, name) == getattr(config(cls), name)
    if away(default) in entry.also:
        return
    with pytest.raises(ConfigError) as error:
        config(cls, **{name: away(default)})
    assert str(error.value).startswith(f"{name}=")
    assert entry.reason in str(error.value)
    assert entry.way_out in str(error.value)


@pytest.mark.parametrize(("cls", "name", "entry", "default"), names_of(NoEffect))
def test_a_name_without_effect_is_logged_away_from_its_default(
    config, cls, name, entry, default, caplog
):
    config(cls, **{name: default})
    assert f"{name}=" not in caplog.text
    workers = {"dataloader_num_workers": 1} if name == "dataloader_prefetch_factor" else {}
    config(cls, **{name: away(default)}, **workers)
    assert (f"{name}=" in caplog.text) == (away(default) not in entry.also)


def test_a_field_of_a_newer_transformers_is_refused_when_changed(tmp_path):
    @dataclass(repr=False)
    class Newer(PPOConfig):
        brand_new: bool = False

    Newer.__module__ = "transformers.training_args"
    assert Newer(output_dir=str(tmp_path)).brand_new is False
    with pytest.raises(ConfigError, match="brand_new=True is not supported"):
        Newer(output_dir=str(tmp_path), brand_new=True)


def test_one_declaration_is_enough_for_a_new_option(config, tmp_path):
    @dataclass(repr=False)
    class Mine(PPOConfig):
        SECTION = "engine"
        steps_ahead: Count = option(2, "Steps.")  # noqa: RUF009

    globals()["Mine"] = Mine
    assert config(Mine).resume_values()["steps_ahead"] == 2
    with pytest.raises(ConfigError, match="steps_ahead=0 must be at least 1"):
        config(Mine, steps_ahead=0)
    (made,) = HfArgumentParser((Mine,)).parse_args_into_dataclasses(
        ["--steps_ahead", "5", "--output_dir", str(tmp_path)]
    )
    assert made.steps_ahead == 5


# -- other names ----------------------------------------------------------------------------------


TEXTS = {"hub_model_id", "hub_token", "hub_revision", "tokenizer_name_or_path"}


def aliases():
    """Every other name of an option of every dialect, and a value that it takes."""
    values = {"torchdynamo": "eager", "warmup_ratio": 0.25, "episodes": "3"}
    values["evaluation_strategy"] = "steps"
    for cls in DIALECTS:
        for name, entry in cls.STATUS.items():
            if isinstance(entry, Alias) and name != "vllm_importance_sampling_cap":
                default = default_of(cls.__dataclass_fields__[entry.target])
                value = "me/it" if entry.target in TEXTS else 4
                if isinstance(default, bool) or name == "adafactor":
                    value = True
                yield cls, name, entry.target, values.get(name, value)


@newest
@pytest.mark.parametrize(("cls", "old", "new", "value"), [*aliases()])
def test_another_name_hands_its_value_over(config, cls, old, new, value):
    made = config(cls, **{old: value})
    want = {"adafactor": "adafactor", "episodes": 3, "stop_token_id": [4]}.get(old, value)
    assert getattr(made, new) == want
    assert replace(made).to_dict() == made.to_dict()


@newest
def test_two_names_of_an_option_must_agree(config):
    config = partial(config, options.PPOConfig)
    with pytest.raises(ConfigError, match="is another name of warmup_steps, but warmup_steps=5 is"):
        config(warmup_ratio=0.1, warmup_steps=5)
    assert config(warmup_ratio=0.1, warmup_steps=0.1).warmup_steps == 0.1
    with pytest.raises(ConfigError, match=r"warmup_ratio=1\.5 must be .* below 1"):
        config(warmup_ratio=1.5)


def test_an_alias_can_be_read_and_set(config):
    made = config(options.GRPOConfig, max_completion_length=9)
    assert (made.max_completion_length, made.response_length) == (9, 9)
    for value in (7, 8):
        made.max_completion_length = value
        assert (made.max_completion_length, made.response_length) == (value, value)
    made.max_completion_length = 0
    with pytest.raises(ConfigError, match="response_length=0 must be"):
        made.checked()
    for other in (copy.deepcopy(config(GRPOConfig)), pickle.loads(pickle.dumps(config()))):
        assert not hasattr(other, "no_such_name")


def test_a_config_survives_its_own_dict(config):
    made = PPOConfig(
        output_dir="out", stop_token="eos", learning_rate=1e-4, report_to="tensorboard"
    )
    assert made.to_dict()["stop_token"] == "eos"
    assert PPOConfig(**made.to_dict()).to_dict() == made.to_dict()
    secret = config(hub_token="hf_secret")
    assert "hf_secret" not in str(secret.to_dict())
    assert "hf_secret" not in repr(secret)


# -- argument parsers -----------------------------------------------------------------------------


@pytest.mark.parametrize("parser", [HfArgumentParser, ScriptParser])
def test_parsers_take_every_name(parser):
    flags = "--output_dir out --fp16_opt_level O1 --no_cuda --disable_dropout true --num-iterations"
    parse_flags = parser((options.GRPOConfig,)).parse_args_into_dataclasses
    (made,) = parse_flags([*flags.split(), "3"])
    assert (made.use_cpu, made.num_ppo_epochs, made.num_iterations) == (True, 3, 3)
    assert replace(made).to_dict() == made.to_dict()
    flags = ["--output_dir", "out", "--use_cpu"]
    with pytest.raises(ConfigError, match=r"sapo_temperature_pos=0\.1 is not supported"):
        parse_flags([*flags, "--sapo_temperature_pos", "0.1"])
    with pytest.raises(
        ConfigError, match="another name of response_length, but response_length=4 is"
    ):
        parse_flags([*flags, "--max_completion_length", "9", "--response_length", "4"])
    with pytest.raises(ValueError, match=r"not (used|flags)"):
        parse_flags([*flags, "--nonsense"])
    values = {"output_dir": "out", "use_cpu": True, "num_iterations": 3, "log_multimodal": True}
    assert parser((options.GRPOConfig,)).parse_dict(values)[0].num_ppo_epochs == 3
    with pytest.raises(ValueError, match="nonsense"):
        parser((options.GRPOConfig,)).parse_dict({**values, "nonsense": 1})


def test_a_program_may_repeat_fields_of_a_config():
    @dataclass
    class Script:
        exp_name: str = "mine"
        more: int = 0

    globals()["Script"] = Script
    parser = ScriptParser((PPOConfig, Script))
    flags = ["--output_dir", "out", "--use_cpu", "--exp_name", "a", "--more", "3"]
    config, script = parser.parse_args_into_dataclasses(flags)
    assert (config.exp_name, script.exp_name, script.more) == ("ppo_config", "a", 3)


@newest
def test_names_without_effect_are_not_in_the_help(capsys):
    HfArgumentParser((options.GRPOConfig,)).print_help()
    text = capsys.readouterr().out
    assert "--max_completion_length" in text
    assert [n for n in ("save_safetensors", "log_multimodal") if f"--{n} " in text] == []


# -- resuming -------------------------------------------------------------------------------------


def test_a_resumed_run_must_share_what_changes_the_numbers(config):
    same = config().resume_values()
    assert {"learning_rate", "kl_coef", "lam", "temperature", "seed", "max_lag"} <= same.keys()
    assert {"shuffle_dataset", "value_learning_rate", "rollout_engine"} <= same.keys()
    assert {"environment", "max_turns", "on_env_error", "train_layers", "tf32"} <= same.keys()
    may_change = {"output_dir", "logging_steps", "save_steps", "max_steps", "run_name"}
    may_change |= {"dataset_num_proc", "preflight", "save_rollouts", "worker_timeout", "report_to"}
    may_change |= {"environment_timeout", "environment_concurrency", "cache_trunk"}
    may_change |= {"per_device_train_batch_size", "local_rollout_forward_batch_size"}
    assert may_change & same.keys() == set()


NAMED: list[type[Any]] = [
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


@pytest.mark.parametrize("config", NAMED, ids=lambda c: f"{c.__module__}.{c.__name__}")
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
        (kedge.PPOConfig, "no_cuda", "use_cpu"),
        (kedge.AsyncPPOConfig, "per_gpu_train_batch_size", "per_device_train_batch_size"),
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


def test_names_of_trl_are_taken_by_its_dialect() -> None:
    text = said(GRPOConfig, "max_completion_length")
    assert text.endswith("it is called response_length here; kedge.trl takes TRL's names")
    assert said(GRPOConfig, "use_vllm").endswith("'use_vllm'; kedge.trl takes TRL's names")


def test_a_copy_of_a_config_in_other_names_keeps_its_values() -> None:
    given = {"num_iterations": 3, "max_completion_length": 77}
    config = options.GRPOConfig(output_dir="unused", use_cpu=True, **given)
    copied = replace(replace(config, seed=5))
    assert (copied.num_ppo_epochs, copied.response_length, copied.seed) == (3, 77, 5)
    assert replace(config, num_ppo_epochs=4, num_iterations=4).num_ppo_epochs == 4
    with pytest.raises(ConfigError, match=r"num_ppo_epochs=4 is set.*: change both"):
        replace(config, num_ppo_epochs=4)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_arguments_of_trainers(trainer: type[Any]) -> None:
    name = trainer.__name__
    assert said(trainer, "modl") == f"{name} has no argument 'modl'; the nearest is model"
    assert said(trainer, "learning_rate") == (
        f"{name} has no argument 'learning_rate'; it is an option of the config"
    )


def test_arguments_of_trainers_are_not_options() -> None:
    trainers = (kedge.PPOTrainer, kedge.RLOOTrainer, kedge.GRPOTrainer)
    named = {n for t in trainers for n in inspect.signature(t).parameters}
    named -= {"args", "shared", "arguments", "unnamed"}
    options = {f.name for f in fields(PPOConfig)}
    assert (named | {*SharedArguments.__optional_keys__}) - options == TRAINER_ARGUMENTS
    want = "GRPOConfig has no option 'reward_funcs'; it is an argument of the trainer"
    assert said(GRPOConfig, "reward_funcs") == want


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


@pytest.mark.parametrize("config", NAMED, ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_a_config_stays_a_dataclass(config: type[Any]) -> None:
    signature = inspect.signature(config)
    assert [*signature.parameters] == [f.name for f in fields(config) if f.init]
    with assume_all_packages():
        made = config(learning_rate=0.25)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.learning_rate == 0.25


def test_a_name_is_in_one_group_and_every_group_has_one_of_ours() -> None:
    every = [name for group in names.ALIASES for name in group]
    assert len(every) == len(set(every))
    known = {n for made in (*NAMED, *TRAINERS) for n in inspect.signature(made).parameters}
    known |= {f.name for made in DIALECTS for f in fields(made)} | {"lora_r"}
    assert [group for group in names.ALIASES if not known & set(group)] == []


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (options.GRPOConfig, {"use_vllm": True}),
        (AsyncPPOConfig, {"num_evals": 8}),
        (AsyncPPOConfig, {"enable_prefix_caching": True}),
    ],
)
def test_an_option_that_became_another_is_not_read_late(
    config: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    made = config(output_dir=str(tmp_path), use_cpu=True)
    made.checked()
    ((name, value),) = changes.items()
    setattr(made, name, value)
    with pytest.raises(ConfigError, match=f"{name}={value} is only read when the config is made"):
        made.checked()
