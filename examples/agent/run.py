"""An agent in a text world, on a CPU: expert episodes, supervised start, PPO with turn credit.

make demo-agent                            about six minutes on two cores
python examples/agent/run.py --quick       the same with little training, as a smoke test

The policy sees one room at a time, and finds keys, doors and gold in 6 to 12 turns.  It starts
from episodes of a careless expert.  PPO then trains it on new worlds, with a reward of 1 for the
gold and nothing else.  Success is measured on worlds that neither stage has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# Models this small gain little from a second thread, and slow down a lot on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from model import load, save_untrained
from rich.console import Console

from kedge import PPOConfig, PPOTrainer
from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.cli.main import guarded
from kedge.cli.train import sft
from kedge.environments import EnvironmentRollouts, EpisodeReward
from kedge.environments.experts import expert_episodes
from kedge.environments.games import TextWorld
from kedge.types import PromptBatch, Rollout, Sampling

PROMPT = [{"role": "user", "content": ""}]  # the environment's first observation follows
MAX_TURNS = 16
EPISODE = 300  # tokens of an episode, after its first observation
NOISE = 0.3  # share of arbitrary actions in the expert's episodes

console = Console()


@dataclass(frozen=True)
class Sizes:
    """Sizes of both training stages and of the evaluation."""

    expert_episodes: int = 3000
    batch: int = 64  # episodes of an iteration
    iterations: int = 60
    evaluated: int = 500


QUICK = Sizes(expert_episodes=64, batch=8, iterations=3, evaluated=16)


def make_environment() -> TextWorld:
    """One world after the other."""
    return TextWorld(rules=False)


def write_episodes(file: Path, episodes: int, seed: int) -> list[str]:
    """Write episodes of the careless expert; returns all texts in them."""
    seeds = range(seed * 10**6, seed * 10**6 + episodes)
    rows = list(expert_episodes(make_environment, seeds, noise=NOISE, max_turns=MAX_TURNS))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows))
    return [message["content"] for row in rows for message in row["messages"]]


def supervise(folder: Path, sizes: Sizes, seed: int) -> None:
    """The starting policy, by ``kedge sft``."""
    texts = write_episodes(folder / "episodes.jsonl", sizes.expert_episodes, seed)
    save_untrained(folder / "model", texts, seed)
    options = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "episodes.jsonl",
        "output_dir": folder / "sft",
        "assistant_only_loss": True,
        "per_device_train_batch_size": 32,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "logging_steps": max(1, sizes.expert_episodes // 32 // 4),
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": seed,
    }
    sft.main([word for name, value in options.items() for word in (f"--{name}", str(value))])


def play(engine: Any, tokenizer: Any) -> EnvironmentRollouts:
    """The engine, playing text worlds."""
    return EnvironmentRollouts(
        engine, make_environment, tokenizer, max_turns=MAX_TURNS, max_turn_tokens=6
    )


def train(folder: Path, sizes: Sizes, seed: int) -> Any:
    """PPO from the supervised model; returns the trained policy."""
    model, tokenizer = load(folder / "sft")
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=str(folder / "ppo"),
            per_device_train_batch_size=sizes.batch,
            max_steps=sizes.iterations,
            num_ppo_epochs=4,
            response_length=EPISODE,
            stop_token="eos",
            temperature=1.0,
            learning_rate=1e-3,
            kl_coef=0.0,
            gamma=1.0,
            lam=0.95,
            value_source="policy",
            gradient_checkpointing=False,
            logging_steps=max(1, sizes.iterations // 20),
            save_strategy="no",
            overwrite_output_dir=True,
            num_sample_generations=0,
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
        ),
        tokenizer,
        model,
        train_dataset=[{"prompt": PROMPT}] * sizes.batch,
        reward_funcs=[EpisodeReward()],
        rollout_engine=play(EmbeddedEngine(model, pad_id=tokenizer.pad_token_id), tokenizer),
    )
    trainer.train()
    trainer.save_model()
    return trainer.model


def evaluate(model: Any, tokenizer: Any, episodes: int, seed: int) -> Rollout:
    """Episodes in worlds of other seeds than those of training, sampled as in training."""
    text = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]] * episodes)
    order = torch.arange(episodes)
    prompts = PromptBatch(
        ids=ids,
        mask=torch.ones_like(ids, dtype=torch.bool),
        group=order,
        row=order,
        columns={"prompt": [PROMPT] * episodes},
    )
    engine = play(EmbeddedEngine(model, pad_id=tokenizer.pad_token_id), tokenizer)
    stop = (tokenizer.eos_token_id,)
    sampling = Sampling(max_new_tokens=EPISODE, temperature=1.0, stop_ids=stop)
    return engine.generate(prompts, sampling=sampling, seed=10**9 + seed)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95% confidence interval of a share (Wilson 1927)."""
    z, p = 1.96, successes / count
    middle = p + z * z / (2 * count)
    half = z * sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def main(argv: list[str]) -> None:
    """Train, evaluate, and write everything to a folder."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--output_dir", default="runs/agent", type=Path)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--quick", action="store_true", help="little training, as a smoke test")
    args = flags.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    folder, sizes = args.output_dir, QUICK if args.quick else Sizes()
    begin = time.perf_counter()

    console.rule("1. episodes of a careless expert, and the supervised model")
    supervise(folder, sizes, args.seed)
    model, tokenizer = load(folder / "sft")
    before = evaluate(model, tokenizer, sizes.evaluated, args.seed)
    middle = time.perf_counter()
    console.print(before.episodes.metrics, middle - begin)

    console.rule("2. PPO")
    trained = train(folder, sizes, args.seed)
    after = evaluate(trained, tokenizer, sizes.evaluated, args.seed)
    console.print(after.episodes.metrics, time.perf_counter() - middle)


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:], name="demo-agent"))
