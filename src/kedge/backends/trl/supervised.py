"""Supervised fine-tuning."""

from __future__ import annotations

from typing import Any, Literal

import torch

from kedge.backends.trl.progress import train_with_progress
from kedge.errors import ConfigError, DataError


def train_supervised(
    model: Any, tokenizer: Any, config: Any, train: Any, test: Any = None, *, peft: Any = None
) -> Any:
    """Train on texts, on prompts and their completions, or on chats, and save.

    Every completion ends with the tokenizer's end-of-text token, so that the model learns to stop;
    with prompts, the loss is that of completions alone.

    Args:
        model: a causal language model.
        tokenizer: its own; its end-of-text token is needed.
        config: ``trl.SFTConfig``.
        train: rows with ``text``, ``prompt`` and ``completion``, or ``messages``.
        test: rows to evaluate on.
        peft: a PEFT configuration.

    Returns:
        The trainer.

    Raises:
        DataError: none of these columns, or a tokenizer without end of text.
    """
    from trl.trainer.sft_trainer import SFTTrainer

    have = set(train.column_names)
    if not ({"text"} <= have or {"prompt", "completion"} <= have or {"messages"} <= have):
        raise DataError(
            f"supervised training needs a column text, columns prompt and completion, or messages;"
            f" there are {', '.join(sorted(have))}"
        )
    if tokenizer.eos_token is None:
        raise DataError(
            "the tokenizer has no end-of-text token, with which completions have to end"
        )
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
    """Options that differ from TRL's defaults, where they are not given."""
    gpu = torch.cuda.is_available()
    found: dict[str, Any] = {"report_to": "none", "logging_steps": 10}
    return found if gpu else found | {"bf16": False, "dataloader_pin_memory": False}
