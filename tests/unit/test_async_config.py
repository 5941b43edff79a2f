"""Asynchronous PPO under open-instruct's names: every one is a flag, and means what it says."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kedge import AsyncPPOConfig
from kedge.cli.arguments import ModelArguments, ScriptArguments
from kedge.cli.train import async_ppo
from kedge.cli.train.async_ppo import apply_template, load_mixed, without_answer
from kedge.config.base import foreign
from kedge.config.declare import default_of
from kedge.errors import ConfigError, DataError

from .text_toys import word_tokenizer

# Every argument of the script that this command stands for, with its default there; DIFFERENT:
# another default here, for the reason given.
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
    "lora_dropout": (0.05, "PPO trains without dropout"),
}


def small(**changes: Any) -> AsyncPPOConfig:
    options: dict[str, Any] = {"rollout_engine": "embedded", "use_cpu": True}
    return AsyncPPOConfig(**(options | changes))


def test_every_name_is_there_with_its_default() -> None:
    kinds = (AsyncPPOConfig, ScriptArguments, ModelArguments)
    known = {f.name: default_of(f) for kind in reversed(kinds) for f in fields(kind)}
    for kind in (AsyncPPOConfig, ModelArguments):
        known |= {name: entry.default for name, entry in foreign(kind).items()}
    assert {*NAMES, *ALIASES, *DIFFERENT} - set(known) == set()
    assert {n: known[n] for n in NAMES if known[n] != NAMES[n]} == {}
    assert all(known[name] is None for name in ALIASES)
    assert all(known[name] != theirs for name, (theirs, _) in DIFFERENT.items())


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"num_epochs": 2}, {"num_ppo_epochs": 2}),
        ({"beta": 0.1}, {"kl_coef": 0.1}),
        ({"eps": 1e-6}, {"adam_epsilon": 1e-6}),
        ({"min_response_length": 5}, {"min_new_tokens": 5}),
        ({"warm_up_steps": 7}, {"warmup_steps": 2}),  # 4 epochs x 1 mini-batch an iteration
        ({"warm_up_steps": 8, "num_epochs": 1}, {"warmup_steps": 8}),
        ({"vllm_num_engines": 0, "rollout_engine": "ray"}, {"rollout_engine": "embedded"}),
        ({"episodes": "100k"}, {"total_episodes": 100_000}),
        ({"episodes": "64"}, {"total_episodes": 64}),
        ({"tokenizer_name": "a"}, {"tokenizer_name_or_path": "a"}),
        ({"hf_repo_revision": "a"}, {"hub_revision": "a"}),
        ({"max_prompt_token_length": 100}, {"max_prompt_length": 100}),
        ({"max_prompt_token_length": 600}, {"max_prompt_length": 512}),
        ({"max_token_length": 128}, {"max_prompt_length": 128}),
        ({"kl_estimator": "kl3"}, {"kl_estimator": "k3"}),
        ({"stop_token": "period"}, {"stop_token": None, "stop_strings": ["."]}),
        ({}, {"max_lag": 1, "gradient_accumulation_steps": 64, "num_mini_batches": 1}),
        ({"async_mode": False}, {"max_lag": 0}),
        ({"max_lag": 3}, {"max_lag": 3}),
        (
            {"local_rollout_batch_size": 8, "number_samples_per_prompt": 4,
             "per_device_train_batch_size": 2, "local_mini_batch_size": 16},
            {"gradient_accumulation_steps": 16, "num_mini_batches": 2, "num_generations": 4},
        ),
        ({"local_rollout_batch_size": 16}, {"local_mini_batch_size": 16, "num_mini_batches": 1}),
        ({"save_freq": 80}, {"save_steps": 80}),
        ({"with_tracking": True}, {"report_to": ["wandb"]}),
        ({"hf_entity": "me", "hf_repo_id": "it"}, {"hub_model_id": "me/it"}),
        ({"dataset_mixer_eval_list": ["a", "1.0"], "num_evals": 5}, {"eval_steps": 0.2}),
    ],
)  # fmt: skip
def test_other_names_hand_their_values_over(
    given: dict[str, Any], becomes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(**given)
    assert {name: getattr(config, name) for name in becomes} == becomes
    config.checked()  # a settled config is a valid one


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beta": 0.1, "kl_coef": 0.2}, "beta=0.1 is another name of kl_coef"),
        ({"async_mode": False, "max_lag": 2}, "means max_lag=0, but max_lag=2 is set"),
        ({"local_mini_batch_size": 48}, "local_mini_batch_size=48 must divide"),
        ({"per_device_train_batch_size": 3}, "must be a multiple of per_device_train_batch_size=3"),
        ({"local_rollout_batch_size": 0}, "must be at least 1"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3 is set"),
        ({"save_freq": 0}, "at least 1, or -1 for no checkpoints"),
        ({"save_freq": 10, "save_steps": 20}, "save_steps=20 is set"),
        ({"num_evals": 0}, "num_evals=0 must be at least 1"),
        ({"local_eval_freq": 3}, "num_evals sets the interval"),
        ({"vllm_sync_backend": "mpi"}, "must be one of 'nccl' or 'gloo'"),
        ({"episodes": "many"}, "episodes=many must be an integer such as"),
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
    train, test = load_mixed(
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
    train, test = load_mixed(
        options(tmp_path, *both, "--dataset_mixer_list_splits", "train", "test")
    )
    assert len(train) == 9
    assert test is None
    with pytest.raises(DataError, match=r"got 3 splits \(a, b, c\) for 2 datasets"):
        load_mixed(options(tmp_path, *both, "--dataset_mixer_list_splits", "a", "b", "c"))


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
    with pytest.raises(ConfigError, match=r"must be tulu, .* or a file"):
        apply_template(word_tokenizer(), small(chat_template_name="llama"))
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
