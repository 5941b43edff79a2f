"""Settings of ``kedge init`` by task and model size, each with the source of its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIZES = ("0.5b", "1b", "7b")
Setting = tuple[str, Any, str]  # name; value, or a tuple with one for each size; comment

SOURCES = {
    "N+": "arXiv:2403.17031, PPO on TL;DR summaries, 1B to 6.9B",
    "TRL": "the commands of its TL;DR runs at 1B and 6.9B, in TRL's page on PPOv2",
    "DeepSeekMath": "arXiv:2402.03300, GRPO at 7B",
    "DAPO": "arXiv:2503.14476, GRPO at 32B",
    "Tulu 3": "arXiv:2411.15124, PPO on verifiable rewards at 8B",
    "RAGEN": "arXiv:2504.20073 and its repository, episodes of several turns at 0.5B to 3B",
    "verl": "the PPO examples of its repository, 0.5B to 7B",
}
CHAT = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
PYTHIA = ("1b", "6.9b")
SUPERVISED = ("runs/sft", *(f"cleanrl/EleutherAI_pythia-{n}-deduped__sft__tldr" for n in PYTHIA))
REWARD = ("runs/reward", *(f"cleanrl/EleutherAI_pythia-{n}-deduped__reward__tldr" for n in PYTHIA))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of a task.

    Args:
        title: what the file is for.
        command: that trains with the file.
        batch: responses of an iteration, over all processes.
        sections: titles and settings.
        files: texts of the files next to it, by suffix.
    """

    title: str
    command: str
    batch: int
    sections: tuple[tuple[str, tuple[Setting, ...]], ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def settings(self, size: str) -> list[tuple[str, list[Setting]]]:
        """Sections with the value of each setting for a model size, one of ``SIZES``."""
        place = SIZES.index(size)
        return [
            (title, [(n, v[place] if isinstance(v, tuple) else v, c) for n, v, c in settings])
            for title, settings in self.sections
        ]


_MEMORY: tuple[Setting, ...] = (
    ("bf16", True, "autocast; trained weights stay float32"),
    ("gradient_checkpointing", True, "false is faster, if kedge plan says it fits"),
)
_LOGGING: tuple[Setting, ...] = (
    ("logging_steps", 1, "iterations"),
    ("save_steps", 50, "iterations"),
    ("report_to", "none", "wandb, tensorboard, trackio, ..."),
)

PREFERENCE = Recipe(
    title="PPO against a reward model (kedge init preference)",
    command="ppo",
    batch=512,
    sections=(
        (
            "What to train, and on what",
            (
                ("model_name_or_path", SUPERVISED, "what kedge sft trains"),
                ("reward_model_path", REWARD, "what kedge reward trains"),
                ("dataset_name", "trl-lib/tldr", "column prompt"),
                ("output_dir", "runs/preference", ""),
            ),
        ),
        (
            "Size of the run",
            (
                ("total_episodes", 1_000_000, "N+; TRL has 100,000 at 6.9B"),
                ("per_device_train_batch_size", (32, 16, 1), "TRL at 1B and 6.9B; see kedge plan"),
                ("gradient_accumulation_steps", None, "512 responses an iteration: N+, TRL"),
                ("num_ppo_epochs", 4, "N+"),
                ("num_mini_batches", 1, "N+"),
                ("response_length", 53, "tokens; N+"),
            ),
        ),
        (
            "Step size",
            (
                ("learning_rate", 3.0e-6, "N+, TRL: the same at all sizes"),
                ("cliprange", 0.2, "N+"),
                ("cliprange_value", 0.2, "N+"),
                ("vf_coef", 0.1, "N+"),
                ("kl_coef", 0.05, "N+"),
            ),
        ),
        (
            "Sampling and reward",
            (
                ("temperature", 0.7, "N+"),
                ("missing_eos_penalty", 1.0, "TRL: responses must end"),
            ),
        ),
        ("Memory", _MEMORY),
        ("Logs and checkpoints", _LOGGING),
    ),
)

VERIFIER = Recipe(
    title="GRPO on answers that can be checked (kedge init verifier)",
    command="grpo",
    batch=1024,
    sections=(
        (
            "What to train, and on what",
            (
                ("model_name_or_path", CHAT, ""),
                (
                    "dataset_name",
                    "train.jsonl",
                    "columns prompt, and ground_truth for the verifier",
                ),
                ("reward_funcs", "[kedge.verifiers:math]", "or gsm8k, code, ifeval, your function"),
                ("output_dir", "runs/verifier", ""),
            ),
        ),
        (
            "Size of the run",
            (
                ("max_steps", 500, "iterations; a guess"),
                ("num_generations", 16, "responses per prompt; DAPO"),
                ("per_device_train_batch_size", (16, 8, 2), "a guess: see kedge plan"),
                ("gradient_accumulation_steps", None, "1024 responses an iteration: DeepSeekMath"),
                ("num_mini_batches", 2, "512 responses an optimizer step: DAPO"),
                ("num_ppo_epochs", 1, "DeepSeekMath"),
                ("response_length", (1024, 1024, 2048), "tokens; DeepSeekMath; 2048: Tulu 3"),
            ),
        ),
        (
            "Step size",
            (
                ("learning_rate", 1.0e-6, "DeepSeekMath, DAPO"),
                ("epsilon", 0.2, "DAPO"),
                ("epsilon_high", 0.28, "DAPO"),
                ("beta", 0.0, "no KL: DAPO; DeepSeekMath has 0.04"),
                ("loss_type", "dapo", "DAPO"),
            ),
        ),
        (
            "Sampling",
            (
                ("temperature", 1.0, "DAPO"),
                ("mask_truncated_completions", True, "DAPO: overlong filtering"),
            ),
        ),
        ("Memory", _MEMORY),
        ("Logs and checkpoints", _LOGGING),
    ),
)

_CLASS = '''\
"""The environment of CONFIG: replace GuessNumber by yours."""

import random


class GuessNumber:
    """A number to find in five guesses; reward 1 when it is guessed."""

    def reset(self, *, seed, options):
        """Begin an episode; returns what the policy reads first, and no further information."""
        self.number, self.left = random.Random(seed).randint(1, 20), 5
        return "Guess a number from 1 to 20. Answer with the number alone.", {}

    def step(self, response):
        """Returns observation, reward, terminated, truncated, and metrics to log."""
        self.left -= 1
        text = response.text.strip()
        guess = int(text) if text.isdecimal() and len(text) < 4 else 0
        if guess == self.number:
            return "Correct.", 1.0, True, False, {"metrics": {"success": 1.0}}
        return "Higher." if guess < self.number else "Lower.", 0.0, self.left == 0, False, {}
'''

ENVIRONMENT = Recipe(
    title="PPO on episodes of several turns (kedge init environment)",
    command="ppo",
    batch=128,
    files={".py": _CLASS},
    sections=(
        (
            "What to train, and on what",
            (
                ("model_name_or_path", CHAT, "a chat model"),
                (
                    "environment",
                    "STEM.py:GuessNumber",
                    "a class with reset and step, which rewards",
                ),
                ("output_dir", "runs/environment", ""),
            ),
        ),
        (
            "Size of the run",
            (
                ("max_steps", 200, "iterations; RAGEN"),
                ("num_generations", 16, "episodes from the same start; RAGEN"),
                ("per_device_train_batch_size", (8, 4, 1), "a guess: see kedge plan"),
                ("gradient_accumulation_steps", None, "128 episodes an iteration: RAGEN"),
                ("num_ppo_epochs", 1, "RAGEN"),
                ("num_mini_batches", 4, "32 episodes an optimizer step: RAGEN"),
                ("max_turns", 5, "RAGEN"),
                ("max_turn_tokens", 400, "RAGEN"),
                ("response_length", 2000, "tokens of an episode: RAGEN"),
            ),
        ),
        (
            "Step size",
            (
                ("learning_rate", 1.0e-6, "verl"),
                ("value_learning_rate", 1.0e-5, "verl"),
                ("value_source", "policy", "there is no reward model to start from"),
                ("cliprange", 0.2, "RAGEN, which clips ratios above 1 at 1.28"),
                ("gamma", 1.0, "RAGEN"),
                ("lam", 1.0, "RAGEN"),
                ("kl_coef", 0.0, "RAGEN"),
            ),
        ),
        ("Sampling", (("temperature", 1.0, "RAGEN"),)),
        ("Memory", _MEMORY),
        ("Logs and checkpoints", _LOGGING),
    ),
)

RECIPES = {"preference": PREFERENCE, "verifier": VERIFIER, "environment": ENVIRONMENT}
