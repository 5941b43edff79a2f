"""The stages of an agent: episodes of an expert, supervised model, RL, and evaluation."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# Models this small gain little from a second thread, and slow down a lot on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from model import load, save_untrained

from kedge import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer
from kedge.cli.generate import generate_completions
from kedge.config.algorithms import RECIPES
from kedge.config.common import EnvironmentArguments
from kedge.environments.games import Calculator, TextWorld
from kedge.environments.success import measure_success
from kedge.ext.before_rl import sft_command as sft
from kedge.ext.before_rl.experts import expert_episodes


@dataclass(frozen=True)
class Task:
    """An environment, its limits, and how careless the expert is."""

    environment: type
    options: dict[str, Any]
    max_turns: int
    max_turn_tokens: int
    max_tokens: int  # of an episode, after its first observation
    noise: float  # share of arbitrary actions in the expert's episodes
    epochs: int = 2  # of the supervised stage

    def make(self) -> Any:
        """An environment of the task."""
        return self.environment(**self.options)


TASKS = {
    "text world": Task(TextWorld, {"rules": False}, 14, 6, 300, noise=0.3),
    "calculator": Task(
        Calculator,
        {"rules": False, "largest": 9, "terms": (2, 3)},
        8,
        12,
        160,
        noise=0.1,
        epochs=12,
    ),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of both training stages and of the evaluation."""

    expert_episodes: int = 2000
    batch: int = 64  # episodes of an iteration
    iterations: int = 60
    evaluated: int = 500


def write_episodes(task: Task, file: Path, episodes: int, seed: int) -> list[str]:
    """Write episodes of the careless expert; returns all texts in them."""
    seeds = range(seed * 10**6, seed * 10**6 + episodes)
    options = {"noise": task.noise, "max_turns": task.max_turns}
    rows = list(expert_episodes(task.make, seeds, **options))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows))
    return [message["content"] for row in rows for message in row["messages"]]


def supervise(task: Task, folder: Path, sizes: Sizes, seed: int) -> None:
    """The starting policy, by ``kedge sft``, in ``folder / "sft"``."""
    texts = write_episodes(task, folder / "episodes.jsonl", sizes.expert_episodes, seed)
    save_untrained(folder / "model", texts, seed)
    options = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "episodes.jsonl",
        "output_dir": folder / "sft",
        "assistant_only_loss": True,
        "per_device_train_batch_size": 32,
        "num_train_epochs": task.epochs,
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


VALUE = {
    "value_source": "policy",
    "value_learning_rate": 2e-3,
    "value_warmup_steps": 2,
    "vf_coef": 0.5,
}
# The discount of a turn is the same in all: an action has about three tokens.
BY_TOKENS = {"gamma": 0.98 ** (1 / 3)}
# Rates, warm-up and lambda for this model and 40 tokens an episode: docs/algorithms/sao.md.  Lag
# counts iterations: those of 16 episodes and one or two steps keep the ratio near 1.
SAO = {
    **RECIPES["sao"],
    **BY_TOKENS,
    "lam_alpha": None,
    "rollout_schedule": "in_order",  # rows are sampled together: fewer CPU seconds
    "per_device_train_batch_size": 16,
    "num_mini_batches": 1,
    "lam": 0.95,
    "lam_value": 0.95,
    "freeze_value_attention": False,
    "value_learning_rate": 2e-3,
    "value_warmup_steps": 8,
}
CLIPPED = {"policy_loss": "clip", "cliprange": 0.2, "cliprange_high": 0.2}
# A mask does not hold the policy where a clip does: one pass, wide bounds, a slow beginning.
MASKED = {"num_ppo_epochs": 1, "warmup_steps": 40, "cliprange": 0.8, "cliprange_high": 3.0}
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "PPO, turns": (PPOTrainer, PPOConfig, VALUE | {"credit": "turn", "gamma": 0.98}),
    "PPO, tokens": (PPOTrainer, PPOConfig, VALUE | BY_TOKENS),
    "PPO, value model": (PPOTrainer, PPOConfig, VALUE | BY_TOKENS | {"value_source": "copy"}),
    "SAO": (PPOTrainer, PPOConfig, SAO | MASKED),
    "SAO, clipped": (PPOTrainer, PPOConfig, SAO | CLIPPED),
    "RLOO": (RLOOTrainer, RLOOConfig, {"num_generations": 4}),
    "GRPO": (GRPOTrainer, GRPOConfig, {"num_generations": 8}),
}


def arguments(task: Task, output: Path, sizes: Sizes, seed: int, method: str) -> Any:
    """The options of one of ``METHODS``."""
    _, config, options = METHODS[method]
    defaults = {
        "environment_kwargs": task.options,
        "max_turns": task.max_turns,
        "max_turn_tokens": task.max_turn_tokens,
        "response_length": task.max_tokens,
        "stop_token": "eos",
        "temperature": 1.0,
        "total_episodes": sizes.batch * sizes.iterations,
        "per_device_train_batch_size": sizes.batch,
        "num_ppo_epochs": 2,
        "num_mini_batches": 4,
        "learning_rate": 5e-4,
        "kl_coef": 0.0,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "overwrite_output_dir": True,
        "num_sample_generations": 0,
        "logging_steps": max(1, sizes.iterations // 20),
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return config(output_dir=str(output), seed=seed, **defaults | options)


def train(
    task: Task, start: Path, output: Path, sizes: Sizes, seed: int, method: str = "PPO, value model"
) -> None:
    """Train the model in ``start`` by one of ``METHODS``."""
    model, tokenizer = load(start)
    trainer = METHODS[method][0](
        model=model,
        processing_class=tokenizer,
        environment=task.environment,
        args=arguments(task, output, sizes, seed, method),
    )
    trainer.train()
    trainer.save_model()


def evaluate(task: Task, folder: Path, episodes: int, seed: int) -> dict[str, Any]:
    """Success of the model in a folder on seeds that training does not use, at temperature 1."""
    options = EnvironmentArguments(
        environment=task.environment,
        environment_kwargs=task.options,
        max_turns=task.max_turns,
        max_turn_tokens=task.max_turn_tokens,
    )
    played = generate_completions(
        str(folder),
        None,
        environment=options,
        episodes=episodes,
        temperature=1.0,
        batch_size=episodes,
        max_new_tokens=task.max_tokens,
        seed=seed,
    )
    return measure_success(played)
