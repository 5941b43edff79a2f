"""Asynchronous PPO under open-instruct's names: every one is a flag, and means what it says."""

from __future__ import annotations

import json
import pickle
import subprocess
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kedge import AsyncPPOConfig
from kedge.cli.options import ModelArguments, ScriptArguments
from kedge.config.declare import default_of
from kedge.config.rollout_engines import assume_all_packages
from kedge.ext.open_instruct import command as async_ppo
from kedge.ext.open_instruct.command import apply_template, load_rows, without_answer
from kedge.records.errors import ConfigError, DataError

from .text_toys import word_tokenizer

# Every argument of the script that this command stands for, with its default there; DIFFERENT:
# another default here, for the reason given.
IN_FLIGHT = {"rollout_schedule": "as_completed", "in_flight_weight_updates": True}
SCRIPTS = Path(__file__).parents[2] / "scripts" / "train"
NAMES = json.loads((Path(__file__).parent / "async_ppo_defaults.json").read_text())
# Names whose value is another option's; unset here.
ALIASES = {
    *("num_epochs", "beta", "eps", "number_samples_per_prompt", "max_prompt_token_length"),
    *("min_response_length", "hf_repo_revision"),
    "vllm_gpu_memory_utilization",  # 0.9 there, and in vLLM itself
}
DIFFERENT = {
    "push_to_hub": (True, "nothing is pushed unless asked for"),
    "wandb_project_name": ("open_instruct_internal", "another project"),
    "exp_name": ("ppo_vllm_thread_ray_gtrl", "another program"),
    "learning_rate": (2e-5, "models of billions of weights take 1e-6"),
    "adam_epsilon": (1e-5, "open-instruct does not pass it on"),
    "lora_dropout": (0.05, "PPO trains without dropout"),
}


def small(**changes: Any) -> AsyncPPOConfig:
    options: dict[str, Any] = {"rollout_engine": "embedded", "use_cpu": True}
    return AsyncPPOConfig(**(options | changes))


def test_every_name_is_there_with_its_default() -> None:
    kinds = (AsyncPPOConfig, ScriptArguments, ModelArguments)
    known = {f.name: default_of(f) for kind in reversed(kinds) for f in fields(kind)}
    assert {*NAMES, *ALIASES, *DIFFERENT} - set(known) == set()
    assert {n: known[n] for n in NAMES if known[n] != NAMES[n]} == {}
    assert all(known[name] is None for name in ALIASES)
    assert all(known[name] != theirs for name, (theirs, _) in DIFFERENT.items())


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"warm_up_steps": 7}, {"warmup_steps": 2}),  # 4 epochs x 1 mini-batch an iteration
        ({"warm_up_steps": 8, "num_epochs": 1}, {"warmup_steps": 8}),
        ({"vllm_num_engines": 0, "rollout_engine": "ray"}, {"rollout_engine": "embedded"}),
        ({"episodes": "100k"}, {"total_episodes": 100_000}),
        ({"max_prompt_token_length": 600}, {"max_prompt_length": 512}),
        ({"max_token_length": 128}, {"max_prompt_length": 128}),
        ({"kl_estimator": "kl3"}, {"kl_estimator": "k3"}),
        ({"stop_token": "period"}, {"stop_token": None, "stop_strings": ["."]}),
        ({}, {"max_lag": 1, "gradient_accumulation_steps": 64, "num_mini_batches": 1}),
        ({"async_mode": False}, {"max_lag": 0}),
        ({"max_lag": 3}, {"max_lag": 3}),
        (IN_FLIGHT, {"max_lag": 2}),
        ({**IN_FLIGHT, "max_lag": 1}, {"max_lag": 1}),
        (
            {"local_rollout_batch_size": 8, "number_samples_per_prompt": 4,
             "per_device_train_batch_size": 2, "local_mini_batch_size": 16},
            {"gradient_accumulation_steps": 16, "num_mini_batches": 2, "num_generations": 4},
        ),
        ({"num_mini_batches": 4}, {"local_mini_batch_size": 16, "num_mini_batches": 4}),
        ({"local_rollout_batch_size": 16}, {"local_mini_batch_size": 16, "num_mini_batches": 1}),
        ({"save_freq": 80}, {"save_steps": 80}),
        ({"with_tracking": True}, {"report_to": ["wandb"]}),
        ({"hf_entity": "me", "hf_repo_id": "it"}, {"hub_model_id": "me/it"}),
        ({"dataset_mixer_eval_list": ["a", "1.0"], "num_evals": 5}, {"eval_steps": 0.2}),
    ],
)  # fmt: skip
def test_other_names_hand_their_values_over(given: dict[str, Any], becomes: dict[str, Any]) -> None:
    config = small(**given)
    assert {name: getattr(config, name) for name in becomes} == becomes
    config.checked()  # a settled config is a valid one


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beta": 0.1, "kl_coef": 0.2}, "beta=0.1 is another name of kl_coef"),
        ({"async_mode": False, "max_lag": 2}, "means max_lag=0, but max_lag=2 is set"),
        ({"num_mini_batches": 5}, "num_mini_batches=5 must divide the 64 responses"),
        ({"local_mini_batch_size": 32, "num_mini_batches": 4}, "num_mini_batches=4 is set"),
        ({"local_mini_batch_size": 48}, "local_mini_batch_size=48 must divide"),
        ({"per_device_train_batch_size": 3}, "must be a multiple of per_device_train_batch_size=3"),
        ({"local_rollout_batch_size": 0}, "must be at least 1"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3 is set"),
        ({"save_freq": 0}, "at least 1, or -1 for no checkpoints"),
        ({"save_freq": 10, "save_steps": 20}, "save_steps=20 is set"),
        ({"num_evals": 0}, "num_evals=0 must be at least 1"),
        ({"local_eval_freq": 3}, "num_evals sets the interval"),
        ({"vllm_sync_backend": "mpi"}, "must be one of 'nccl' or 'gloo'"),
        ({"episodes": "many"}, "episodes='many' must be an integer such as"),
        ({"use_fast": False}, "only has fast tokenizers"),
        ({"warm_up_steps": 8, "warmup_steps": 1}, "warmup_steps=1 is set; set only one"),
        ({"dataset_transform_fn": ["sft_filter_v1"]}, "always tokenized and filtered"),
        ({"stop_token": "comma"}, "stop_token='comma'"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small(**given)


def test_options_of_vllm_reach_it_or_are_said_to_be_unread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kedge.config.rollout_engines.installed", lambda package: True)
    given: dict[str, Any] = {"vllm_enforce_eager": True, "vllm_gpu_memory_utilization": 0.3}
    config = small(rollout_engine="vllm", vllm_engine_args={"max_model_len": 99}, **given)
    assert config.vllm_engine_args == {
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "max_model_len": 99,
    }
    assert small(**given).vllm_engine_args is None
    assert "enforce_eager, gpu_memory_utilization: no effect" in caplog.text


def test_a_run_that_a_finding_ended_exits_with_1_on_ray_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = import_module("kedge.ext.ray.launch")
    monkeypatch.setattr(module, "launch", lambda job, **how: pickle.loads(pickle.dumps(job))())
    flags = ["--rollout_engine", "embedded", "--use_cpu", "--actor_num_gpus_per_node", "2"]
    for finding, code in (("entropy-collapse", 1), (None, 0)):
        monkeypatch.setattr(async_ppo, "learn", lambda o, x=finding: SimpleNamespace(stopped_by=x))
        assert async_ppo.main([*flags, "--output_dir", "out"]) == code
        assert ("the trained model is in out" in capsys.readouterr().err) == (finding is None)


# -- data -----------------------------------------------------------------------------------


def options(tmp_path: Path, *flags: str) -> Any:
    base = ["--rollout_engine", "embedded", "--use_cpu", "--output_dir", str(tmp_path / "out")]
    return async_ppo.parse_options([*base, *flags])


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    folder = tmp_path / "chats"
    folder.mkdir()
    for split, count in (("train", 6), ("test", 3)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{split} {i}"},
                    {"role": "assistant", "content": "an answer"},
                ],
                "truth": str(i),
                "source": "GSM8K",
            }
            for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_chats_become_prompts_and_columns_get_their_names(chats: Path, tmp_path: Path) -> None:
    train, test = load_rows(
        options(
            tmp_path,
            *("--dataset_mixer_list", str(chats), "1.0", "--dataset_mixer_eval_list", str(chats)),
            *("2", "--dataset_mixer_eval_list_splits", "test", "--ground_truths_key", "truth"),
            *("--dataset_source_key", "source"),
        )
    )
    assert (len(train), len(test)) == (6, 2)
    assert sorted(train.column_names) == ["dataset", "ground_truth", "prompt"]
    assert all(row["prompt"][0]["content"].startswith("train") for row in train)
    assert all(len(row["prompt"]) == 1 for row in train)
    assert all(row["prompt"][0]["content"].startswith("test") for row in test)


def test_each_dataset_has_its_split(chats: Path, tmp_path: Path) -> None:
    both = ("--dataset_mixer_list", str(chats), "1.0", str(chats), "1.0")
    train, test = load_rows(
        options(tmp_path, *both, "--dataset_mixer_list_splits", "train", "test")
    )
    assert len(train) == 9
    assert test is None
    with pytest.raises(DataError, match=r"got 3 splits \(a, b, c\) for 2 datasets"):
        load_rows(options(tmp_path, *both, "--dataset_mixer_list_splits", "a", "b", "c"))


def test_a_chat_without_answer_stays_whole() -> None:
    user = {"role": "user", "content": "a"}
    assert without_answer([user]) == [user]
    assert without_answer([]) == []


def test_tulu_is_the_format_that_it_says() -> None:
    tokenizer = apply_template(word_tokenizer(), small(chat_template_name="tulu"))
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>\ns\n<|user|>\nu\n<|assistant|>\n"
    answered = [*turns, {"role": "assistant", "content": "a"}]
    text = tokenizer.apply_chat_template(answered, tokenize=False)
    assert text == "<|system|>\ns\n<|user|>\nu\n<|assistant|>\na<eos>"


def test_templates_from_files_and_begin_of_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    tokenizer = word_tokenizer()
    tokenizer.bos_token = "w3"
    apply_template(tokenizer, small(chat_template_name=str(file), add_bos=True))
    said = tokenizer.apply_chat_template([{"role": "user", "content": "u"}], tokenize=False)
    assert said == "w3u!"
    with pytest.raises(ConfigError, match="needs a tokenizer with a BOS token"):
        apply_template(word_tokenizer(), small(add_bos=True))


def test_templates_of_open_instruct_join_turns() -> None:
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    joined = {
        "zephyr": "<|user|>\nu<eos>\n<|assistant|>\na<eos>\n",
        "simple_chat": "User: u\n\nAssistant: a<eos>",
        "simple_concat_with_space": "u a<eos>",
        "simple_concat_with_new_line": "u\na<eos>",
    }
    for name, text in joined.items():
        tokenizer = apply_template(word_tokenizer(), small(chat_template_name=name))
        assert tokenizer.apply_chat_template(turns, tokenize=False) == text
        asking = tokenizer.apply_chat_template(
            turns[:1], tokenize=False, add_generation_prompt=True
        )
        assert "<eos>" not in asking or name == "zephyr"


# -- scripts and flags -----------------------------------------------------------------------


def flags_of(script: Path, tmp_path: Path) -> list[str]:
    """What a script hands to ``kedge``."""
    stub = tmp_path / "kedge"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    command, *flags = done.stdout.splitlines()
    assert command == "async-ppo"
    return flags


@pytest.mark.parametrize(
    ("name", "means"),
    [
        (
            "debug/ppo.sh",
            {"gradient_accumulation_steps": 4, "max_prompt_length": 512, "single_gpu_mode": True,
             "num_ppo_epochs": 1, "deepspeed_stage": 3, "penalty_reward_value": -10.0},
        ),
        (
            "tulu3/ppo_8b.sh",
            {"actor_num_gpus_per_node": [4, 8], "vllm_tensor_parallel_size": 4,
             "report_to": ["wandb"], "num_ppo_epochs": 4,
             "gradient_accumulation_steps": 8, "max_lag": 1},
        ),
    ],
)  # fmt: skip
def test_the_scripts_say_what_they_mean(name: str, means: dict[str, Any], tmp_path: Path) -> None:
    with assume_all_packages():
        options = async_ppo.parse_options([*flags_of(SCRIPTS / name, tmp_path), "--use_cpu"])
    assert {key: getattr(options.config, key) for key in means} == means
    assert options.script.value_model_path == options.config.reward_model_path
    assert options.script.apply_verifiable_reward


# Flags that upstream's scripts use, and the option that each one sets.
FLAGS = {
    "--no_push_to_hub": ("push_to_hub", False),
    "--no_bf16": ("bf16", False),
    "--no-gradient-checkpointing": ("gradient_checkpointing", False),
    "--no_apply_verifiable_reward": ("apply_verifiable_reward", False),
    "--use_fast": ("use_fast", True),
    "--torch_dtype bfloat16": ("dtype", "bfloat16"),
    "--lora_dropout 0.05": ("lora_dropout", 0.0),
    "--reward_model_revision main": ("reward_model_revision", "main"),
    "--tokenizer_revision main": ("tokenizer_revision", "main"),
    "--dataset_transform_fn rlvr_tokenize_v1 rlvr_filter_v1": ("rollout_engine", "embedded"),
    "--episodes 2k": ("total_episodes", 2000),
}


@pytest.mark.parametrize(("flag", "sets"), FLAGS.items())
def test_flags_of_open_instruct_act(flag: str, sets: tuple[str, Any], tmp_path: Path) -> None:
    made = options(tmp_path, *flag.split())
    name, value = sets
    holders = (made.config, made.script, made.model)
    assert value in [getattr(x, name) for x in holders if hasattr(x, name)]


def test_an_unknown_template_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template_name='olmo' must be tulu, zephyr"):
        options(tmp_path, "--chat_template_name", "olmo")


def test_what_differs_from_open_instruct_is_said_once(tmp_path: Path) -> None:
    made = options(tmp_path, "--no_bf16", "--num_epochs", "2", "--warm_up_steps", "5")
    assert async_ppo.compare(made) == [
        "float32 instead of bfloat16 (--bf16)",
        "attention as transformers chooses instead of flash_attention_2 (--attn_implementation)",
        "responses end at EOS (--stop_token none for fixed length)",
        "learning rate 1e-06 instead of 2e-05 (--learning_rate)",
        "weight decay 0 instead of 0.01 (--weight_decay)",
        "5 optimizer steps of warmup are rounded up to 3 iterations of 2",
    ]
    same = ("--bf16", "--attn_implementation", "flash_attention_2", "--learning_rate", "2e-5")
    made = options(tmp_path, *same, "--weight_decay", "0.01", "--stop_token", "eos")
    assert async_ppo.compare(made) == []
