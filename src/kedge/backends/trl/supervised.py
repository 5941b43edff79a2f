"""Supervised fine-tuning with TRL."""

from __future__ import annotations

from typing import Any, Literal

import torch

from kedge.backends.trl.progress import train_with_progress
from kedge.backends.trl.tokenize import tokenize_rows
from kedge.errors import ConfigError, DataError


def train_supervised(
    model: Any, tokenizer: Any, config: Any, train: Any, test: Any = None, *, peft: Any = None
) -> Any:
    """Train on texts, prompts with completions, or chats, and save.

    Every completion ends with the tokenizer's end-of-text token, so that the model learns to stop;
    with prompts, the loss covers completions only.

    Args:
        model: a causal language model.
        tokenizer: tokenizer of the model; must have an end-of-text token.
        config: ``trl.SFTConfig``.
        train: rows with ``text``, ``prompt`` and ``completion``, or ``messages``.
        test: rows to evaluate on.
        peft: a PEFT configuration.

    Returns:
        The trainer.

    Raises:
        DataError: none of these columns, or a tokenizer without an end-of-text token.
    """
    from trl.trainer.sft_trainer import SFTTrainer

    columns = set(train.column_names)
    accepted = ({"text"}, {"prompt", "completion"}, {"messages"})
    if not any(names <= columns for names in accepted):
        raise DataError(
            f"supervised training needs a column text, columns prompt and completion, or messages;"
            f" the dataset has {', '.join(sorted(columns))}"
        )
    if tokenizer.eos_token is None:
        raise DataError(
            "the tokenizer must have an end-of-text token to end completions; set eos_token"
        )
    train, test, config = tokenize_rows(train, test, tokenizer, config)
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=peft,
    )
    train_with_progress(trainer)
    trainer.save_model(config.output_dir)
    tokenizer.save_pretrained(config.output_dir)
    return trainer


def config_class(kind: Literal["sft", "reward"]) -> Any:
    """``SFTConfig`` or ``RewardConfig``.

    Raises:
        ConfigError: TRL is not installed.
    """
    try:
        from trl.trainer.reward_config import RewardConfig
        from trl.trainer.sft_config import SFTConfig
    except ImportError as error:
        raise ConfigError(
            f"kedge {kind} needs TRL: pip install 'kedge[pipeline]' ({error})"
        ) from error
    return SFTConfig if kind == "sft" else RewardConfig


def defaults() -> dict[str, Any]:
    """Defaults that differ from TRL's."""
    gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"report_to": "none", "logging_steps": 10}
    return options if gpu else options | {"bf16": False, "dataloader_pin_memory": False}
