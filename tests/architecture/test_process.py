"""Importing Kedge and training with it changes nothing of other libraries in the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import argparse, inspect, sys, tempfile
import torch, transformers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM
from transformers import masking_utils, modeling_utils
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

OWNERS = [masking_utils, modeling_utils, sdpa_attention, modeling_llama, torch,
    torch.nn.functional, torch.nn.Linear, torch.nn.Module, transformers.Trainer, argparse,
    modeling_llama.LlamaAttention, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaModel,
    argparse.ArgumentParser, argparse.Action, HfArgumentParser]

def functions():
    found = {(o.__name__, n): f for o in OWNERS for n, f in vars(o).items() if inspect.isroutine(f)}
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        found[type(table).__name__, "sdpa"] = table["sdpa"]
    return found

def outputs():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        usual = bystander(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = bystander(input_ids=ids)
    return [usual.logits, *usual.hidden_states, rounded.logits]

torch.manual_seed(0)
shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
bystander = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).eval()
before, expected = functions(), outputs()

import kedge
from kedge import PPOConfig, PPOTrainer
from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer

class During(transformers.TrainerCallback):
    seen = []
    def on_pre_optimizer_step(self, *_, **__):
        self.seen.append(all(map(torch.equal, outputs(), expected)))

tokenizer = word_tokenizer()
config = PPOConfig(output_dir=tempfile.mkdtemp(), total_episodes=16, per_device_train_batch_size=4,
    gradient_accumulation_steps=2, response_length=6, report_to="none", max_lag=1)
PPOTrainer(model=tiny_policy("llama", vocab_size=len(tokenizer)), args=config,
    train_dataset=[{"prompt": "red green"}, {"prompt": "blue"}] * 8, processing_class=tokenizer,
    reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
    callbacks=[During]).train()
after = functions()
print("changed", sorted(name for name in before if after.get(name) is not before[name]))
print("added", sorted(set(after) - set(before)))
print("during", set(During.seen), len(During.seen) > 0)
print("after", all(map(torch.equal, outputs(), expected)))
"""


def test_nothing_of_other_libraries_is_replaced() -> None:
    root = Path(__file__).parents[2]  # a fresh interpreter: Kedge must not be loaded yet
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=root, env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-4:] == [
        "changed []",
        "added []",
        "during {True} True",
        "after True",
    ], done.stderr
