"""The flags and recipes of open-instruct as commands of ``kedge async-ppo``."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from kedge.cli.main import main
from kedge.cli.train import async_ppo
from kedge.config.rollout_engines import elsewhere
from kedge.errors import ConfigError
from kedge.testing import tiny_policy

from .test_async_config import options
from .text_toys import word_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts" / "train"


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
    with elsewhere():
        options = async_ppo.parse_options([*flags_of(SCRIPTS / name, tmp_path), "--use_cpu"])
    assert {key: getattr(options.config, key) for key in means} == means
    assert options.script.value_model_path == options.config.reward_model_path
    assert options.script.apply_verifiable_reward


@pytest.mark.parametrize("name", ["debug/ppo.sh", "tulu3/ppo_8b.sh"])
def test_the_scripts_can_be_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With local data and models in place of those on the hub."""
    model, chats = tmp_path / "model", tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "w3 w4"}], "ground_truth": "1"}
    chats.write_text("\n".join(json.dumps(row | {"dataset": "gsm8k"}) for _ in range(6)))
    tiny_policy(vocab_size=32, max_position_embeddings=4096).save_pretrained(model)
    word_tokenizer().save_pretrained(model)
    local = ("--dataset_mixer_list", str(chats), "1.0", "--dataset_mixer_eval_list", str(chats))
    models = ("--model_name_or_path", str(model), "--reward_model_path", str(model))
    flags = [*flags_of(SCRIPTS / name, tmp_path), *local, "2", *models, "--use_cpu"]
    flags.append("--dummy_reward")
    assert main(["plan", "async-ppo", *flags, "--output_dir", str(tmp_path / "out")]) == 0
    rows = [line.strip(" │").split() for line in capsys.readouterr().out.splitlines()]
    assert ["prompts", "│", "6", "│"] in rows or ["prompts", "│", "6"] in rows
    assert any(row[:1] == ["peak"] for row in rows)


def test_the_8b_recipe_fits_gpus_of_80_gb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the configuration of Llama 3.1 8B, and prompts and responses of 2,048 tokens."""
    model, chats = tmp_path / "model", tmp_path / "chats.jsonl"
    message = {"role": "user", "content": "w3 " * 2040}
    chats.write_text(json.dumps({"messages": [message], "ground_truth": "1", "dataset": "gsm8k"}))
    LlamaConfig(
        vocab_size=128_264, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131_072,
    ).save_pretrained(model)  # fmt: skip
    word_tokenizer().save_pretrained(model)
    local = ("--dataset_mixer_list", str(chats), "1.0", "--dataset_mixer_eval_list", str(chats))
    models = ("--model_name_or_path", str(model), "--reward_model_path", str(model))
    flags = [*flags_of(SCRIPTS / "tulu3/ppo_8b.sh", tmp_path), *local, "1", *models, "--bf16"]
    flags += ["--use_cpu", "--output_dir", str(tmp_path / "out")]

    def planned(*more: str) -> str:
        assert main(["plan", "async-ppo", *flags, *more]) == 0
        return " ".join(capsys.readouterr().out.split())

    text = planned()
    # (16 bytes of 8.03 and of 7.50 billion trained weights, and 4 of the reference) / 12 learners
    shards = ((8.03 + 7.50) * 16 + 8.03 * 4) * 1e9 / 12 / 2**30
    # No copy: embedding, head and a layer of 218 million weights, in float32 while they are
    # verified, and two buffers of 1 GiB from which they are sent.
    widened = (2 * 128_264 * 4096 + 218e6) * 4 / 2**30 + 2
    sync = re.search(r"weight sync ([0-9.]+) GiB", text.partition("first of 12 GPUs")[2])
    assert sync is not None
    assert float(sync[1]) == pytest.approx(shards + widened, rel=0.01)
    assert "fits a GPU of 79.0 GiB" in text
    assert "does not fit" not in text
    upstream = planned("--deepspeed_stage", "2")
    assert "does not fit a GPU of 79.0 GiB" in upstream
    assert "set --deepspeed_stage 3" in upstream


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
        "Adam's epsilon 1e-05 instead of 1e-08 (--eps)",
        "weight decay 0 instead of 0.01 (--weight_decay)",
        "5 optimizer steps of warmup are rounded up to 3 iterations of 2",
    ]
    same = ("--bf16", "--attn_implementation", "flash_attention_2", "--eps", "1e-8")
    made = options(tmp_path, *same, "--weight_decay", "0.01", "--stop_token", "eos")
    assert async_ppo.compare(made) == []
