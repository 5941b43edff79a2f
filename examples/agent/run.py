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
from rich.table import Table

from kedge import PPOConfig, PPOTrainer
from kedge.algorithms import ppo
from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.cli.main import guarded
from kedge.cli.train import sft
from kedge.environments import EnvironmentRollouts, EpisodeReward
from kedge.environments.experts import expert_episodes
from kedge.environments.games import TextWorld
from kedge.types import PromptBatch, Sampling

PROMPT = [{"role": "user", "content": ""}]  # the environment's first observation follows
MAX_TURNS = 14
EPISODE = 300  # tokens of an episode, after its first observation
NOISE = 0.3  # share of arbitrary actions in the expert's episodes

console = Console()


@dataclass(frozen=True)
class Sizes:
    """Sizes of both training stages and of the evaluation."""

    expert_episodes: int = 2000
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


def train(folder: Path, sizes: Sizes, seed: int) -> None:
    """PPO from the supervised model."""
    model, tokenizer = load(folder / "sft")
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=str(folder / "ppo"),
            per_device_train_batch_size=sizes.batch,
            max_steps=sizes.iterations,
            num_ppo_epochs=2,
            num_mini_batches=4,
            response_length=EPISODE,
            stop_token="eos",
            temperature=1.0,
            learning_rate=5e-4,
            value_learning_rate=2e-3,
            value_warmup_steps=2,
            kl_coef=0.0,
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
        algorithm=ppo(credit="turn", gamma=0.98, lam=0.95, vf_coef=0.5, reference=False),
        rollout_engine=play(EmbeddedEngine(model, pad_id=tokenizer.pad_token_id), tokenizer),
    )
    trainer.train()
    trainer.save_model()


def evaluate(model: Any, tokenizer: Any, episodes: int, seed: int) -> dict[str, float]:
    """Success on worlds of other seeds than those of training, sampled as in training."""
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
    rollout = engine.generate(prompts, sampling=sampling, seed=10**9 + seed)
    totals = rollout.episodes.metrics
    successes, _ = totals["environment/success"]
    low, high = wilson(int(successes), episodes)
    means = {name: totals[f"environment/{name}"][0] / episodes for name in ("turns", "illegal")}
    return {"success": successes / episodes, "low": low, "high": high, **means}


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95% confidence interval of a share (Wilson 1927)."""
    z, share = 1.96, successes / count
    middle = share + z * z / (2 * count)
    half = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def show_result(before: dict[str, float], after: dict[str, float], episodes: int) -> None:
    """Print the results in one table."""
    both = (before, after)
    shares = [f"{x['success']:.1%}  ({x['low']:.1%} .. {x['high']:.1%})" for x in both]
    result = Table("", "supervised", "PPO", title="result", title_justify="left")
    result.add_row(f"success on {episodes} new worlds", *shares)
    result.add_row("turns per episode", *(f"{x['turns']:.1f}" for x in both))
    result.add_row("impossible actions per episode", *(f"{x['illegal']:.1f}" for x in both))
    console.print(result)


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
    before = evaluate(*load(folder / "sft"), sizes.evaluated, args.seed)
    console.print(f"success on {sizes.evaluated} new worlds: {before['success']:.1%}")

    console.rule("2. PPO, with an advantage for each turn")
    middle = time.perf_counter()
    train(folder, sizes, args.seed)
    after = evaluate(*load(folder / "ppo"), sizes.evaluated, args.seed)
    now = time.perf_counter()
    summary = {
        "supervised": before,
        "ppo": after,
        "seconds": round(now - begin, 1),
        "seconds_ppo": round(now - middle, 1),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show_result(before, after, sizes.evaluated)
    console.print(
        f"{summary['seconds']:.0f} seconds. Models, episodes and curves are in {folder};"
        f" `kedge report {folder}/ppo` writes a report page of the run."
    )


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:], name="demo-agent"))
