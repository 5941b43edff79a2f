"""The demo with TRL 1.12's PPO in the place of Kedge's: same models, prompts and settings.

python benchmarks/speedrun/trl_ppo.py --output_dir D --seed 0 --peer PYTHON

PYTHON is that of an environment with TRL 1.12 (`benchmarks.ppo_vs_trl` makes one).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def train(folder: Path, options: dict[str, Any]) -> None:
    """TRL's PPO from the demo's supervised model and its reward model, which starts the value."""
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "sft", padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "sft") for _ in range(2))
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(folder / "reward") for _ in range(2)
    )
    rows = load_dataset("json", data_files=str(folder / "data" / "prompts.jsonl"), split="train")
    rows = rows.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]})
    rows = rows.remove_columns(["prompt"])
    trainer = PPOTrainer(
        args=PPOConfig(**options, bf16=False, use_cpu=True, report_to="none", logging_steps=10),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=rows,
        eval_dataset=rows.select(range(64)),
    )
    trainer.train()
    trainer.save_model(str(folder / "ppo"))
    tokenizer.save_pretrained(folder / "ppo")


def main() -> None:
    """The stages of the demo around TRL's PPO."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    flags.add_argument("--output_dir", type=Path, required=True)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--peer", required=True)
    flags.add_argument("--options", type=json.loads, help="only PPO, with these options")
    args = flags.parse_args()
    folder = args.output_dir.absolute()
    if args.options:
        train(folder, args.options)
        return
    sys.path.insert(0, str(DEMO))
    import run as demo

    sizes, held_out = demo.Sizes(), folder / "data" / "held_out.jsonl"
    demo.train_supervised(folder, args.seed, sizes)
    demo.summarize(folder, "sft", held_out, args.seed)
    demo.judge(folder, "judged-sft", "sft", "@reference")
    demo.train_reward_model(folder, args.seed, sizes)
    options = demo.PPO | {"total_episodes": sizes.episodes, "num_sample_generations": 0}
    options |= {"seed": args.seed, "output_dir": str(folder / "ppo")}
    options["missing_eos_penalty"] = -options.pop("penalty_reward_value")
    for name in ("non_eos_penalty", "logging_steps"):
        options.pop(name)
    words = ["--output_dir", str(folder), "--peer", args.peer, "--options", json.dumps(options)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([args.peer, "-W", "ignore", __file__, *words], env=env, check=True)
    demo.summarize(folder, "ppo", held_out, args.seed)
    demo.judge(folder, "judged-ppo", "ppo", "@reference")
    demo.judge(folder, "ppo-against-sft", "ppo", folder / "summaries-sft" / "completions.jsonl")


if __name__ == "__main__":
    main()
