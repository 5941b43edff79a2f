"""PPOConfig: every field of the printed signature, honored or refused; values; resolve()."""

import inspect
import json
import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import transformers
from transformers import HfArgumentParser, TrainingArguments

import kedge
from kedge.algorithms import ppo
from kedge.backends.ray.resources import RayCluster
from kedge.config.compat.transformers4 import REMOVED, RemovedArguments
from kedge.config.declare import default_of
from kedge.config.option_status import FIELD_SUPPORT, INHERITED, OWN
from kedge.config.options import Honored, Moved, Refused
from kedge.config.ppo import PPOConfig, PPOv2Config
from kedge.config.rollout_engines import ROLLOUT_ENGINES, load_function
from kedge.config.sampling import build_sampling
from kedge.config.schedule import build_schedule, warmup_iterations
from kedge.config.values import shown
from kedge.engine.batch_sizes import compute_batch_sizes
from kedge.errors import ConfigError

PRINTED = json.loads((Path(__file__).parent / "ppo_config_defaults.json").read_text())
FIELDS = {f.name: f for f in fields(PPOConfig)}


@pytest.fixture
def config(tmp_path):
    def make(**options):
        return PPOConfig(output_dir=str(tmp_path / "out"), **options)

    return make


def away(name):
    """Some value that is not the default."""
    default = default_of(FIELDS[name])
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return ["x"] if isinstance(default, list) else f"{default}x"


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


def test_the_printed_signature_is_whole():
    assert len(PRINTED) == 164


def test_every_field_has_a_help_text():
    assert [n for n, f in FIELDS.items() if not f.metadata.get("help")] == []


def test_every_field_is_in_the_table_and_nothing_else_is():
    mine = {f.name for f in fields(PPOv2Config)}
    inherited = {f.name for f in fields(TrainingArguments)}
    assert mine - set(FIELD_SUPPORT) == set()
    # Fields of another transformers 5 may be listed without being there.
    assert set(FIELD_SUPPORT) - mine <= set(INHERITED)
    assert inherited - set(FIELD_SUPPORT) == set()
    assert set(REMOVED) == {f.name for f in fields(RemovedArguments)}
    assert set(OWN) & set(INHERITED) == set()


REFUSED = [
    n
    for n, s in FIELD_SUPPORT.items()
    if isinstance(s, Refused) and n in FIELDS and away(n) not in s.also
]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_raises_when_changed(config, name):
    support = FIELD_SUPPORT[name]
    with pytest.raises(ConfigError) as error:
        config(**{name: away(name)})
    assert str(error.value).startswith(f"{name}=")
    assert support.reason in str(error.value)
    assert support.way_out in str(error.value)


def test_honored_fields_say_where_they_act():
    assert all(s.where for s in FIELD_SUPPORT.values() if isinstance(s, Honored))
    assert len(REFUSED) > 25  # the walk above is not empty


# Honored by transformers itself, in the file named, or by being accepted.
ELSEWHERE = {
    **dict.fromkeys(("tf32", "log_on_each_node", "ddp_backend", "ddp_timeout"), "training_args.py"),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), "training_args.py"),
    "accelerator_config": "training_args.py",
    "eval_strategy": "trainer_callback.py",
    "project": "integrations/integration_utils.py",
    "trackio_space_id": "integrations/integration_utils.py",
    "trackio_bucket_id": "integrations/integration_utils.py",
    "trackio_static_space_id": "integrations/integration_utils.py",
    "logging_dir": "integrations/integration_utils.py",
    **dict.fromkeys(("local_rank", "include_tokens_per_second", "keep_sampling_mask"), None),
    **dict.fromkeys(("num_total_batches", "local_batch_size", "local_mini_batch_size"), None),
}


def test_every_honored_field_is_read_somewhere():
    root = Path(kedge.__file__).parent
    tables = {"field_support.py", "removed.py", "checks.py"}
    text = "\n".join(p.read_text() for p in root.rglob("*.py") if p.name not in tables)
    takes_options = [ppo, compute_batch_sizes, RayCluster]
    takes_options += [load_function(spec.build) for spec in ROLLOUT_ENGINES.values()]
    by_signature = {name for f in takes_options for name in inspect.signature(f).parameters}
    missing = []
    for name, support in FIELD_SUPPORT.items():
        if not isinstance(support, Honored):
            continue
        where = ELSEWHERE.get(name, "")
        if where:
            theirs = (Path(transformers.__file__).parent / where).read_text()
            found = re.search(rf"\b(args|self)\.{name}\b", theirs)
        else:
            found = where is None or name in by_signature
            found = found or re.search(rf"\b(args|_args|config|self)\.{name}\b", text)
        if not found:
            missing.append(name)
    assert missing == []


def test_a_field_of_a_newer_transformers_is_refused_when_changed(tmp_path):
    @dataclass(repr=False)
    class Newer(PPOConfig):
        brand_new: bool = False

    assert Newer(output_dir=str(tmp_path)).brand_new is False
    with pytest.raises(ConfigError, match="brand_new=True is not supported"):
        Newer(output_dir=str(tmp_path), brand_new=True)


@pytest.mark.parametrize(
    ("old", "value", "new", "want"),
    [
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
        ("per_gpu_eval_batch_size", 3, "per_device_eval_batch_size", 3),
        ("warmup_ratio", 0.25, "warmup_steps", 0.25),
        ("no_cuda", True, "use_cpu", True),
        ("adafactor", True, "optim", "adafactor"),
        ("push_to_hub_model_id", "me/m", "hub_model_id", "me/m"),
        ("push_to_hub_token", "hf_x", "hub_token", "hf_x"),
        ("torchdynamo", "eager", "torch_compile_backend", "eager"),
        ("non_stop_penalty", True, "non_eos_penalty", True),
    ],
)
def test_an_older_name_hands_its_value_over(config, old, value, new, want):
    made = config(**{old: value})
    assert getattr(made, new) == want
    assert isinstance(FIELD_SUPPORT[old], Moved)
    assert replace(made).to_dict() == made.to_dict()


def test_every_moved_field_is_in_the_list_above():
    assert sum(isinstance(s, Moved) for s in FIELD_SUPPORT.values()) == 9


def test_both_names_of_a_value_are_refused(config):
    with pytest.raises(ConfigError, match="another name of warmup_steps, which is set to 5"):
        config(warmup_ratio=0.1, warmup_steps=5)
    with pytest.raises(ConfigError, match=r"warmup_ratio=1\.5 must be"):
        config(warmup_ratio=1.5)


def test_a_config_survives_its_own_dict(config):
    made = config(stop_token="eos", learning_rate=1e-4, report_to="tensorboard")
    assert made.to_dict()["stop_token"] == "eos"
    assert PPOConfig(**made.to_dict()).to_dict() == made.to_dict()
    secret = config(hub_token="hf_secret")
    assert "hf_secret" not in str(secret.to_dict())
    assert "hf_secret" not in repr(secret)


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
    with pytest.raises(ConfigError, match="2 processes were launched, but this one sees 1"):
        config()


def test_gradient_checkpointing_is_on_unless_turned_off(config):
    assert config().gradient_checkpointing is True
    assert config(gradient_checkpointing=False).gradient_checkpointing is False


BAD = [
    ({"lam": 1.5}, "lam=1.5 must be a number of at least 0 and at most 1"),
    ({"lam": math.nan}, "lam=nan must be"),
    ({"gamma": -0.1}, "gamma=-0.1 must be"),
    ({"cliprange": 0}, "cliprange=0 must be a number above 0"),
    ({"cliprange_value": -1}, "cliprange_value=-1 must be"),
    ({"temperature": 0}, "temperature=0 must be a number of at least 1e-06 and at most 1000"),
    (
        {"temperature": "hot"},
        "temperature='hot' must be a number",
    ),
    ({"num_mini_batches": 0}, "num_mini_batches=0 must be an integer of at least 1"),
    ({"num_ppo_epochs": 1.5}, "num_ppo_epochs=1.5 must be an integer"),
    ({"num_ppo_epochs": True}, "num_ppo_epochs=True must be"),
    ({"response_length": 0}, "response_length=0 must be"),
    ({"kl_coef": -0.05}, "kl_coef=-0.05 must be"),
    ({"top_p": 0.0}, "top_p=0.0 must be"),
    ({"min_p": 1.0}, "min_p=1.0 must be a number of at least 0 and below 1"),
    ({"top_k": -1}, "top_k=-1 must be"),
    ({"total_episodes": 0}, "total_episodes=0 must be"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be"),
    ({"max_prompt_length": 0}, "max_prompt_length=0 must be"),
    ({"max_lag": -1}, "max_lag=-1 must be"),
    ({"learning_rate": -1e-3}, "learning_rate=-0.001 must be"),
    ({"seed": -1}, "seed=-1 must be"),
    ({"kl_estimator": "k4"}, "kl_estimator='k4' must be one of 'k1', 'k2', 'k3', 'abs', 'full'"),
    ({"stop_token": "pad"}, "stop_token='pad' must be 'eos' or None"),
    ({"stop_token": None, "missing_eos_penalty": 1.0}, "nothing can end a response"),
    ({"stop_token": None, "non_eos_penalty": True}, 'Set stop_token="eos", or leave non_eos_pen'),
    (
        {"stop_token_ids": [-1]},
        "stop_token_ids=[-1] must be a list (each an integer",
    ),
    ({"stop_strings": "end"}, "stop_strings='end' must be a list"),
    ({"stop_strings": [""]}, "stop_strings=[''] must be"),
    ({"min_new_tokens": 9, "response_length": 8}, "min_new_tokens=9 must be at most"),
    ({"top_k": 5}, "top_k=5 excludes tokens from sampling"),
    ({"top_p": 0.9}, "set keep_sampling_mask=True"),
    ({"min_p": 0.1, "top_p": 0.5}, "top_p=0.5, min_p=0.1 excludes tokens from sampling"),
    ({"non_eos_penalty": True, "missing_eos_penalty": 1.0}, "set one of them"),
    ({"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0 must be"),
    ({"on_reward_error": "score"}, "needs reward_error_score"),
    ({"reward_error_score": 0.0}, "needs on_reward_error='score'"),
    ({"on_reward_error": "ignore"}, "on_reward_error='ignore' must be one of"),
    ({"reward_weights": ["a"]}, "reward_weights=['a'] must be a list (each a finite number"),
    ({"adaptive_kl": True, "kl_coef": 0.0}, "kl_coef=0 would stay 0"),
    ({"ref_adapter_name": "a", "model_adapter_name": "a"}, "the reference would be the policy"),
    ({"replay_rollouts": "/nowhere"}, "replay_rollouts='/nowhere' is not a folder"),
    ({"replay_rollouts": "/tmp", "save_rollouts": "x"}, "set one of them"),
    ({"replay_rollouts": "/tmp", "max_lag": 1}, "max_lag=1 has no effect"),
    ({"optim": "galore_adamw"}, "optim='galore_adamw' is not supported"),
    ({"optim": "no_such"}, "no_such"),
    ({"optim": "adafacto"}, "Did you mean 'adafactor'?"),
    ({"optim_args": "x"}, "optim_args='x' must be comma-separated name=value pairs"),
    ({"gradient_checkpointing_kwargs": {"a": 1}}, "has the unknown argument 'a'"),
    ({"gradient_checkpointing_kwargs": '{"a": 1}'}, "has the unknown argument 'a'"),
    ({"fsdp_config": "x"}, "the name of a JSON file or None; the file does not exist"),
    ({"deepspeed": "x"}, "deepspeed='x' must be"),
    ({"torch_compile_mode": "x"}, "torch_compile_mode='x' must be one of 'default', 'lite'"),
    ({"log_level": "loud"}, "log_level='loud' must be one of 'detail', 'debug'"),
    ({"warmup_steps": math.inf}, "warmup_steps=inf must be a number of at least 0"),
    ({"save_rollouts": "a\0b"}, r"save_rollouts='a\x00b' must be a non-empty string"),
    ({"save_rollouts": "a\0b"}, "without NUL characters"),
    ({"save_rollouts": "a" * 5000}, "is too long for a path"),
    ({"stop_strings": ["\ud800"]}, "without lone surrogates"),
    ({"total_episodes": 10**5000}, "total_episodes=a number of about 5001 digits must be"),
    ({"eval_delay": "x"}, "eval_delay='x' must be a number of at least 0, without quotes"),
    ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type='greedy' is not supported"),
    ({"lr_scheduler_type": "nonsense"}, "nonsense"),
    (
        {"accelerator_config": {"split_batches": True}},
        "sets split_batches, which configure a data",
    ),
    ({"output_dir": __file__}, "is a file; give a folder"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end"),
    ({"world_size": 7}, "world_size=7, but 1 processes run"),
    ({"value_source": "magic"}, "value_source='magic' must be one of"),
    ({"score_position": "first"}, "score_position='first' must be one of"),
    ({"overlong_prompts": "keep"}, "overlong_prompts='keep' must be one of"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[shown(o)[:60] for o, _ in BAD])
def test_a_bad_value_is_one_clear_error(tmp_path, options, message):
    with pytest.raises(ConfigError) as error:
        PPOConfig(**{"output_dir": str(tmp_path / "out"), **options})
    assert message in str(error.value)


def test_a_value_set_afterwards_is_checked(config):
    made = config()
    made.lam = 7.0
    with pytest.raises(ConfigError, match=r"lam=7\.0"):
        made.checked()
    made = config()
    made.label_smoothing_factor = 0.1
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1"):
        made.checked()


def test_a_checked_config_is_a_copy(config):
    made = config(non_stop_penalty=True)
    copy = made.checked()
    copy.num_total_batches = 3
    assert (type(copy), made.num_total_batches) == (type(made), None)


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


@pytest.mark.parametrize(("steps", "want"), [(0, 0), (0.1, 2), (0.11, 3), (1, 1), (5, 5)])
def test_warm_up_in_updates_or_as_a_fraction(config, steps, want):
    assert warmup_iterations(config(warmup_steps=steps), 20) == want


def due(c, what, updates=20):
    return [i for i in range(1, updates + 1) if getattr(c, what)(i)]


def test_cadence_counts_updates(config):
    made = config(logging_steps=6, save_steps=0.25, eval_strategy="epoch", logging_first_step=True)
    c = build_schedule(made, iterations=20, iterations_per_epoch=2.5)
    assert due(c, "logs") == [1, 6, 12, 18, 20]
    assert due(c, "saves") == [5, 10, 15, 20]
    assert due(c, "evaluates") == [3, 5, 8, 10, 13, 15, 18, 20]
    assert due(c, "samples") == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]


def test_cadence_can_be_silent(config):
    made = config(logging_strategy="no", save_strategy="no", num_sample_generations=0)
    c = build_schedule(made, iterations=20, iterations_per_epoch=None)
    assert [due(c, w) for w in ("logs", "saves", "evaluates", "samples")] == [[], [], [], []]
    with pytest.raises(ConfigError, match="needs a dataset with a length"):
        build_schedule(config(save_strategy="epoch"), iterations=20, iterations_per_epoch=None)


def test_evaluation_can_start_late(config):
    made = config(eval_strategy="steps", eval_steps=4, eval_delay=9)
    assert due(build_schedule(made, iterations=20, iterations_per_epoch=None), "evaluates") == [
        12,
        16,
        20,
    ]


def test_the_parser_takes_the_printed_command_line():
    printed = (
        "--learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 --output_dir m "
        "--per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 10000 "
        "--missing_eos_penalty 1.0 --stop_token eos --stop_strings a b"
    )
    (made,) = HfArgumentParser((PPOv2Config,)).parse_args_into_dataclasses(printed.split())
    assert made.total_episodes == 10000
    assert made.stop_strings == ["a", "b"]
    assert made.missing_eos_penalty == 1.0
