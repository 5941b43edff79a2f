"""Records the runs that ``kedge doctor`` is tested on: ten with a planted cause, one without.

python tests/data/doctor/record.py      about two minutes; writes NAME.jsonl beside this file
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.unit.text_toys import EOS, word_tokenizer

from kedge import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from kedge.records.types import PromptBatch, Rollout, Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy

HERE = Path(__file__).parent
PROMPTS = [{"prompt": f"w{i} w{i + 1}"} for i in range(3, 25)]
KEPT = (
    *("episode", "lr", "objective/", "policy/", "loss/", "val/", "grad_norm", "skipped_steps"),
    *("completions/", "rollout/"),
)


def threes(completions: list[str], **_: Any) -> list[float]:
    """The share of words that are w3."""
    return [c.split().count("w3") / 8 for c in completions]


def by_chance(completions: list[str], **_: Any) -> list[float]:
    """Scores without reason, the same for the same text."""
    return [zlib.crc32(c.encode()) % 1000 / 100 for c in completions]


class Deaf(EmbeddedEngine):
    """Reports log-probabilities of another temperature than it samples at."""

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        made = super().generate(prompts, sampling=sampling, seed=seed)
        assert made.behavior_logprobs is not None
        return replace(made, behavior_logprobs=made.behavior_logprobs * 1.1)


def run(kind: str, reward: Callable[..., Any], **options: Any) -> list[dict[str, float]]:
    """Rows of a run of 24 updates of 32 responses."""
    torch.manual_seed(0)
    policy = tiny_policy(vocab_size=32)
    engine = options.pop("engine", None)
    config, trainer = {"ppo": (PPOConfig, PPOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}[kind]
    args = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 32,
        "response_length": 8,
        "max_steps": 24,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "num_sample_generations": 0,
        "gradient_checkpointing": False,
        "stop_token": "eos",
        "seed": 0,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    made: Any = trainer(
        args=config(**args | options),
        processing_class=word_tokenizer(),
        model=policy,
        reward_funcs=[reward],
        train_dataset=PROMPTS,
        rollout_engine=None if engine is None else engine(policy, pad_id=EOS),
    )
    made.train()
    return [row for row in made.state.log_history if "objective/scores" in row]


RUNS: dict[str, Callable[[], list[dict[str, float]]]] = {
    "dead reward": lambda: run("ppo", lambda completions, **_: [1.0] * len(completions)),
    "responses without a score": lambda: run(
        "ppo",
        lambda completions, **_: [None if "w4" in c.split() else len(c) / 20 for c in completions],
    ),
    "rollout engine and learner disagree": lambda: run(
        "grpo", threes, engine=Deaf, preflight=False
    ),
    "updates are too large": lambda: run(
        "ppo", by_chance, learning_rate=2e-2, num_ppo_epochs=12, max_grad_norm=0.0
    ),
    "the policy does not move": lambda: run("ppo", threes, learning_rate=1e-7),
    "the policy runs away from the reference": lambda: run(
        "ppo", threes, kl_coef=1e-4, learning_rate=1e-2, max_steps=40
    ),
    "entropy collapses": lambda: run(
        "grpo", threes, num_generations=8, learning_rate=2e-2, max_steps=40
    ),
    "the value explains nothing": lambda: run("ppo", threes, value_learning_rate=0.0),
    "groups of equal scores": lambda: run(
        "grpo",
        lambda completions, **_: [float(c.split()[:2] == ["w3", "w5"]) for c in completions],
        num_generations=4,
    ),
    "the score follows the length": lambda: run(
        "grpo",
        lambda completions, **_: [-len(c.split()) / 16 for c in completions],
        response_length=16,
        max_steps=60,
        num_generations=8,
    ),
    "good": lambda: run("ppo", threes, max_steps=24, learning_rate=2e-3),
}


def main() -> None:
    sys.path.insert(0, str(HERE.parents[2]))
    for name, make in RUNS.items():
        rows = [{k: round(x, 6) for k, x in row.items() if k.startswith(KEPT)} for row in make()]
        file = HERE / f"{name.replace(' ', '_')}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
