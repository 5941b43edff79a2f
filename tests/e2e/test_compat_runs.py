"""Programs of TRL that run unmodified with ``kedge.compat``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes

COMMON = """
import os, sys
from dataclasses import dataclass, field
os.chdir(sys.argv.pop(1))
from tests.e2e.small import PROMPTS, VOCAB, length_reward
from tests.unit.text_toys import neox_reward, word_tokenizer
from kedge.testing import tiny_policy
import torch
MODEL = tiny_policy(vocab_size=VOCAB)
"""
# As MedicalGPT's RLOO script: two options that Kedge's config has as well.
GROUPS = """
from transformers import HfArgumentParser
from trl import {name}Config, {name}Trainer

@dataclass
class ScriptArguments:
    sft_model_path: str = field(default="sft")
    reward_model_path: str = field(default="reward")
    exp_name: str = field(default="mine")

options = ["--sft_model_path", "of the script", "--output_dir", "out", "--max_steps", "2",
           "--per_device_train_batch_size", "4", "--num_generations", "2", "--use_cpu", "True",
           "--max_completion_length", "4", "--save_steps", "1", "--disable_tqdm", "True",
           "--vllm_gpu_memory_utilization", "0.5", "--temperature", "0.9"]
parser = HfArgumentParser((ScriptArguments, {name}Config))
script, args = parser.parse_args_into_dataclasses(options, return_remaining_strings=True)[:2]
assert (script.sft_model_path, script.reward_model_path) == ("of the script", "reward")
assert (args.max_steps, args.temperature, args.num_generations) == (2, 0.9, 2)
for run in range(2):  # the second into the same folder
    trainer = {name}Trainer(model=MODEL, reward_funcs=length_reward, args=args,
                            train_dataset=PROMPTS, processing_class=word_tokenizer())
    metrics = trainer.train().metrics
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()
assert sorted(os.listdir("out/earlier-1")) == ["checkpoint-1", "checkpoint-2"]
assert os.path.isdir("out/checkpoint-2")
print("ran", type(trainer).__module__)
"""
PPO = """
from trl import PPOConfig, PPOTrainer
from trl.experimental.utils import create_reference_model
from trl.experimental.ppo.ppo_trainer import OnlineTrainerState, masked_mean, masked_var
from trl.trainer.utils import OnlineTrainerState

args = PPOConfig(output_dir="out", total_episodes=4, per_device_train_batch_size=4, use_cpu=True,
                 response_length=4, save_strategy="no", disable_tqdm=True)
value, reward = neox_reward(vocab=VOCAB), neox_reward(vocab=VOCAB)
trainer = PPOTrainer(args=args, processing_class=word_tokenizer(), model=MODEL, ref_model=None,
                     reward_model=reward, value_model=value, train_dataset=PROMPTS)
trainer.train()
policy = trainer.accelerator.unwrap_model(trainer.model).policy
assert policy is MODEL
assert trainer.model.value_model is trainer.value_model
assert trainer.model.is_gradient_checkpointing == MODEL.is_gradient_checkpointing
assert trainer.stop_token_id == word_tokenizer().eos_token_id
assert trainer.reward_model is reward
print("ran", type(trainer).__module__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["PPO", "RLOO", "GRPO"])
def test_a_program_runs(program: str, tmp_path: Path) -> None:
    text = PPO if program == "PPO" else GROUPS.replace("{name}", program)
    file = tmp_path / "script.py"
    file.write_text(COMMON + text)
    command = ["-W", "ignore", "-m", "kedge.compat", "run", "--replace", "--report-version", "1.12"]
    done = processes.run(*command, str(file), str(tmp_path))
    assert done.stdout.endswith("ran kedge.ext.trl.compat.trl_trainers\n"), done.stderr
    if program != "PPO":
        assert "earlier-1 now, and this run starts over" in done.stderr
        assert "vllm_gpu_memory_utilization=0.5 has no effect without use_vllm" in done.stderr
