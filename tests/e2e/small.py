"""A PPO run of a second: tiny models, word prompts, a few updates."""

from __future__ import annotations

import tempfile
from typing import Any

from kedge import PPOConfig, PPOTrainer
from kedge.testing import tiny_policy
from tests.unit.text_toys import EOS, neox_reward, word_tokenizer

VOCAB = 32
PROMPTS = [{"prompt": f"w{i} w{i + 1}" + " w3" * (i % 3)} for i in range(3, 16)]
QUIET = {
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "num_sample_generations": 0,
    "use_cpu": True,
    "disable_tqdm": True,
}
TRAINER = {
    *("processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
    *("data_collator", "eval_dataset", "optimizers", "callbacks", "peft_config", "reward_funcs"),
    *("reward_weights", "reward_processing_class", "rollout_engine", "algorithm", "args"),
    *("environment", "tools", "environment_factory", "rollout_func", "compute_metrics"),
}


def length_reward(completions: list[str], **_: Any) -> list[float]:
    """A score that varies: words of the response, and its first word."""
    return [len(c.split()) + 0.1 * (c.split()[:1] == ["w5"]) for c in completions]


def small(**changes: Any) -> PPOTrainer:
    """A trainer; keywords of the trainer and of the config are told apart by name."""
    both = ("rollout_engine", "environment")  # options, if they are names
    trainer = TRAINER - {name for name in both if isinstance(changes.get(name), str)}
    given = {k: v for k, v in changes.items() if k in trainer}
    options: dict[str, Any] = {
        "output_dir": changes.get("output_dir") or tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "total_episodes": 8,
        "num_ppo_epochs": 2,
        "response_length": 6,
        "learning_rate": 3e-3,
        **QUIET,
    }
    options |= {k: v for k, v in changes.items() if k not in trainer}
    parts: dict[str, Any] = {
        "args": None,
        "processing_class": word_tokenizer(),
        "train_dataset": PROMPTS,
    }
    parts |= given  # vLLM changes the layers of gpt_neox for the whole process
    if "model" not in parts:
        parts["model"] = tiny_policy("gpt_neox", vocab_size=VOCAB, eos_token_id=EOS)
    if "reward_model" not in parts:
        parts["reward_model"] = neox_reward(vocab=VOCAB)
    if parts["args"] is None:
        parts["args"] = PPOConfig(**options)
    return PPOTrainer(**parts)


def rows(trainer: PPOTrainer) -> list[dict[str, Any]]:
    """The logged rows of the updates."""
    return [row for row in trainer.state.log_history if "objective/scores" in row]
