"""What TRL's example scripts import is there under the same names, and does the same."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

import kedge
from kedge import (
    GRPOConfig,
    ModelConfig,
    PPOConfig,
    RLOOConfig,
    ScriptArguments,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from kedge.errors import ConfigError
from kedge.verifiers import accuracy_reward, think_format_reward


@pytest.mark.parametrize("config", [PPOConfig, RLOOConfig, GRPOConfig])
def test_the_three_parse_together(config: Any, tmp_path: Path) -> None:
    flags = f"--output_dir {tmp_path} --dataset_name d --use_peft --lora_r 4 --use_cpu"
    flags += " --model_name_or_path m --lora_target_modules q_proj v_proj --dtype bfloat16"
    parser = HfArgumentParser((ScriptArguments, config, ModelConfig))
    script, training, model = parser.parse_args_into_dataclasses(flags.split())
    assert (script.dataset_name, script.dataset_test_split) == ("d", "test")
    assert training.output_dir == str(tmp_path)
    assert (model.torch_dtype, model.trust_remote_code) == ("bfloat16", False)
    adapter = get_peft_config(model)
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (4, 32, 0.05)
    assert adapter.target_modules == {"q_proj", "v_proj"}


@pytest.mark.parametrize("name", ["ModelConfig", "ScriptArguments"])
def test_names_and_defaults_are_trls(name: str) -> None:
    trl = pytest.importorskip("trl")
    theirs = {f.name: f.default for f in fields(getattr(trl, name))}
    ours = {f.name: f.default for f in fields(getattr(kedge, name)) if f.init}
    assert ours == theirs


def test_adapters_and_quantization() -> None:
    assert get_peft_config(ModelConfig()) is None
    assert get_quantization_config(ModelConfig()) is None
    whole = ModelConfig(use_peft=True, lora_target_modules=["all-linear"])
    assert get_peft_config(whole).target_modules == "all-linear"
    four = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="bfloat16"))
    assert four is not None
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)
    assert get_quantization_config(ModelConfig(load_in_8bit=True)).load_in_8bit
    with pytest.raises(ConfigError, match="load_in_8bit and load_in_4bit are both set"):
        ModelConfig(load_in_8bit=True, load_in_4bit=True)
    if not torch.cuda.is_available():
        assert get_kbit_device_map() is None


def test_a_file_gives_defaults_that_flags_override(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KEDGE_TEST_ENV", "before")
    file = tmp_path / "run.yaml"
    file.write_text("lora_r: 4\nuse_peft: true\ndtype: bfloat16\nenv:\n  KEDGE_TEST_ENV: 7\n")
    parse = TrlParser((ScriptArguments, ModelConfig)).parse_args_and_config
    _, model = parse(["--config", str(file), "--lora_r", "8"])
    assert (model.lora_r, model.use_peft, model.dtype) == (8, True, "bfloat16")
    assert os.environ["KEDGE_TEST_ENV"] == "7"
    file.write_text("lora_rank: 4\n")
    again = TrlParser((ScriptArguments, ModelConfig)).parse_args_and_config
    with pytest.raises(ConfigError, match="unknown options: lora_rank"):
        again(["--config", str(file)])
    *_, rest = again(["--config", str(file), "--x", "1"], return_remaining_strings=True)
    assert rest == ["--lora_rank", "4", "--x", "1"]
    for wrong in ("- 1\n", "a: [\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"run\.yaml (must map names|is not valid YAML)"):
            again(["--config", str(file)])


def test_a_file_may_use_other_names_with_our_parser_alone(tmp_path: Path) -> None:
    """What the guide from TRL's PPO says about files."""
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\ntorchdynamo: eager\n")
    ours = TrlParser((PPOConfig,))
    for config in (
        *ours.parse_args_and_config(["--config", str(file)]),
        *ours.parse_yaml_file(file),
    ):
        assert config.torch_compile_backend == "eager"
    (config,) = HfArgumentParser((PPOConfig,)).parse_args_into_dataclasses(
        f"--output_dir {tmp_path} --use_cpu --torchdynamo eager".split()
    )
    assert config.torch_compile_backend == "eager"
    with pytest.raises(ValueError, match="torchdynamo"):
        HfArgumentParser((PPOConfig,)).parse_yaml_file(file)


def test_rewards_of_the_scripts() -> None:
    texts = [
        "<think>a</think>b",
        "<think>a",
        "a</think>b",
        "<think><think>a</think>",
        " <think></think>",
    ]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert think_format_reward(chats) == [1, 0, 0, 0, 0]
    chat = [[{"role": "assistant", "content": "so it is $\\boxed{4}$"}]] * 2
    assert accuracy_reward(chat, solution=["$4$", "$5$"]) == [1, 0]
