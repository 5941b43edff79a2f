"""Peak memory of LoRA PPO: Kedge on one base model and TRL 1.12 with its four models, in turn.

    python -m benchmarks.lora_memory [--peer PYTHON] [--sides kedge trl trl-value-adapter]

Qwen2.5-0.5B's shape with random weights (vocabulary 151,936), batch 8, prompts and responses of 64
tokens, LoRA of rank 16 on all linear layers of the blocks, gradient checkpointing, float32, one
iteration; each side in a fresh process.  The sides:

- kedge: value adapter, reward adapter and reference share the policy's base.
- trl: ``peft_config``, which adapts the policy; the value model trains all its weights.
- trl-value-adapter: a value model that was wrapped with the same LoRA beforehand.

Memory is the process's peak resident set (``VmHWM``), which other programs do not change.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ppo_vs_trl.cases import LAYERS, QWEN

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lora_memory.json"
BATCH, PROMPT, RESPONSE = 8, 64, 64
EOS, PAD = 0, 1


def config() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**QWEN, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD)


def lora(task: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type=task, r=16, lora_alpha=32, target_modules=LAYERS)


def tokenizer() -> Any:
    """A tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(2, QWEN["vocab_size"])}
    numbers = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=numbers, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def prompts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, QWEN["vocab_size"], (BATCH, PROMPT), generator=generator)
    return [{"input_ids": row} for row in ids.tolist()]


def options(folder: str) -> dict[str, Any]:
    """What both libraries name alike."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "total_episodes": BATCH,
        "response_length": RESPONSE,
        "stop_token": None,  # the same work on both sides
        "learning_rate": 1e-4,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": True,
        "num_sample_generations": 0,
        "save_strategy": "no",
        "report_to": "none",
        "local_rollout_forward_batch_size": BATCH,
    }


def write_reward_adapter(folder: str) -> None:
    """A reward adapter as ``kedge reward --use_peft`` and TRL's RewardTrainer save it."""
    from peft import get_peft_model
    from transformers import Qwen2ForSequenceClassification

    settings = config()
    settings.num_labels = 1
    with torch.device("meta"):
        model = get_peft_model(Qwen2ForSequenceClassification(settings), lora("SEQ_CLS"))
    for name, p in list(model.named_parameters()):
        if p.requires_grad:  # the base stays on meta and is not saved
            owner, _, leaf = name.rpartition(".")
            size = 0.01 * torch.randn(p.shape)
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(size))
    model.save_pretrained(folder)


def kedge(folder: str) -> None:
    from transformers import Qwen2ForCausalLM

    from kedge import PPOConfig, PPOTrainer

    adapter = f"{folder}/reward"
    subprocess.run(  # its memory is not a part of the run
        [sys.executable, "-m", "benchmarks.lora_memory", "--write_reward_adapter", adapter],
        cwd=ROOT,
        check=True,
    )
    PPOTrainer(
        PPOConfig(**options(folder), disable_tqdm=True, value_adapter=True, reward_adapter=adapter),
        tokenizer(),
        Qwen2ForCausalLM(config()),
        train_dataset=prompts(),
        peft_config=lora("CAUSAL_LM"),
    ).train()


def trl(folder: str, *, value_adapter: bool = False) -> None:
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    settings = config()
    settings.num_labels = 1
    value = Qwen2ForSequenceClassification(settings)
    if value_adapter:
        wrapped = get_peft_model(value, lora("SEQ_CLS"))
        value = wrapped.get_base_model()  # TRL reads its backbone and its score layer
    rows = Dataset.from_list(prompts())
    PPOTrainer(
        args=PPOConfig(**options(folder)),
        processing_class=tokenizer(),
        model=Qwen2ForCausalLM(config()),
        ref_model=None,
        reward_model=Qwen2ForSequenceClassification(settings),
        value_model=value,
        train_dataset=rows,
        eval_dataset=rows,
        peft_config=lora("CAUSAL_LM"),
    ).train()


SIDES = {
    "kedge": kedge,
    "trl": trl,
    "trl-value-adapter": lambda folder: trl(folder, value_adapter=True),
}


def peak_mib() -> float:
    """The most memory this process has held so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1024


def one(side: str) -> dict[str, Any]:
    """Run one side in this process."""
    import peft
    import transformers

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        SIDES[side](folder)
    return {
        "side": side,
        "peak_mib": peak_mib(),
        "seconds": time.perf_counter() - start,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    }


def run(python: str, side: str) -> dict[str, Any]:
    """Run one side in a fresh process."""
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "benchmarks.lora_memory", "--one", side],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            return json.loads(line.removeprefix("REPORT "))
    raise RuntimeError(f"{side} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--peer", help="python of an environment with trl==1.12.0")
    flags.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    flags.add_argument("--one", help=argparse.SUPPRESS)
    flags.add_argument("--write_reward_adapter", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.write_reward_adapter:
        write_reward_adapter(given.write_reward_adapter)
        return
    if given.one:
        print("REPORT " + json.dumps(one(given.one)))
        return
    reports = json.loads(RESULTS.read_text())["sides"] if RESULTS.exists() else {}
    for side in given.sides:
        peer = None
        if side != "kedge":
            from benchmarks.ppo_vs_trl.__main__ import peer_python

            peer = peer_python(given.peer)
        reports[side] = run(peer or sys.executable, side)
        print(json.dumps(reports[side]), flush=True)
    ratios = {
        side: reports["kedge"]["peak_mib"] / report["peak_mib"]
        for side, report in reports.items()
        if side != "kedge" and "kedge" in reports
    }
    print(json.dumps({"kedge over": ratios}))
    machine = {"processor": platform.processor() or platform.machine()}
    result = {"machine": machine, "shape": QWEN, "sides": reports, "kedge over": ratios}
    RESULTS.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
