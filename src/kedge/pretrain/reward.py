"""Trains reward models from preferences, with the details that PPO relies on.

Huang et al. 2024 (arXiv:2403.17031), details on reward models; Stiennon et al. 2020
(arXiv:2009.01325), appendix B.1: the head is initialized with standard deviation
1 / sqrt(hidden + 1), and after training the score is shifted so that demonstration answers score 0
on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import nn

from kedge.errors import ConfigError, DataError
from kedge.pretrain.reward_check import check_reward_model, write_check
from kedge.pretrain.supervised import train_with_kernels
from kedge.rewards.heads import SHIFT, save_adapter_shift
from kedge.rewards.model import RewardModel


def score_layer(model: nn.Module) -> nn.Linear:
    """The layer that maps the last hidden state to the score.

    Raises:
        ConfigError: the model has no such layer.
    """
    for name in ("score", "classifier"):
        layer = getattr(model, name, None)
        layer = getattr(layer, "out_proj", layer)
        if isinstance(layer, nn.Linear):
            return layer
    raise ConfigError(
        f"{type(model).__name__} has no score or classifier layer to reinitialize; use"
        " --no_fresh_head"
    )


def init_head(model: nn.Module, *, seed: int = 0) -> None:
    """Reinitialize the score head: standard deviation 1 / sqrt(hidden + 1), bias 0."""
    head = score_layer(model)
    generator = torch.Generator().manual_seed(seed)
    deviation = 1 / math.sqrt(head.weight.shape[1] + 1)
    with torch.no_grad():
        weight = torch.randn(head.weight.shape, generator=generator) * deviation
        head.weight.copy_(weight.to(head.weight))
        if head.bias is not None:
            head.bias.zero_()


def train_reward(
    model: Any,
    tokenizer: Any,
    config: Any,
    train: Any,
    test: Any = None,
    *,
    references: Any = None,
    fresh_head: bool = True,
    peft: Any = None,
) -> Any:
    """Train on preferences, shift the score, and save.

    Args:
        model: a sequence-classification model with one label.
        tokenizer: tokenizer of the model.
        config: ``trl.RewardConfig``.
        train: rows with ``chosen`` and ``rejected``, and ``prompt`` if these do not include it.
        test: rows to check the trained model on, also by ``kind`` of mistake; the result is printed
            and written next to it.  Evaluated while training, too, if ``config`` says so.
        references: texts (prompt and answer) that will score 0 on average; None: no shift.
        fresh_head: reinitialize the score head.
        peft: a PEFT configuration.

    Returns:
        The trainer.

    Raises:
        DataError: a column is missing.
    """
    from trl.trainer.reward_trainer import RewardTrainer

    missing = {"chosen", "rejected"} - set(train.column_names)
    if missing:
        raise DataError(
            f"preferences need columns chosen and rejected; {', '.join(sorted(missing))} is missing"
            f" (the dataset has {', '.join(train.column_names)})"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if fresh_head:
        init_head(model, seed=config.seed)
    trainer = RewardTrainer(
        model=model,
        args=config,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=peft,
    )
    _score_last_tokens(trainer)
    train_with_kernels(trainer)
    if references is not None:
        shift_scores(trainer.model, tokenizer, references)
    trainer.save_model(config.output_dir)
    if test is not None:
        check = check_reward_model(trainer.model, trainer.eval_dataset)
        if trainer.is_world_process_zero():
            write_check(check, config.output_dir)
    trained: Any = trainer.model
    if hasattr(trained, "peft_config"):
        save_adapter_shift(config.output_dir, getattr(trained.config, SHIFT, 0.0))
    tokenizer.save_pretrained(config.output_dir)
    return trainer


def _score_last_tokens(trainer: Any) -> None:
    """Score the last token of each row also where it is the padding token, such as EOS.

    transformers scores the last token that is not padding.  For such a batch the padding, in the
    rows and in the configuration, is another token while the loss is computed.
    """
    compute_loss = trainer.compute_loss

    def with_other_padding(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        config = trainer.model.config.get_text_config()
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        ends = set(ids[torch.arange(len(ids)), mask.sum(1) - 1].tolist())
        pad = config.pad_token_id
        if pad not in ends:
            return compute_loss(model, inputs, *args, **options)
        config.pad_token_id = next(token for token in count() if token not in ends)
        ids = ids.masked_fill(mask == 0, config.pad_token_id)
        try:
            return compute_loss(model, {**inputs, "input_ids": ids}, *args, **options)
        finally:
            config.pad_token_id = pad

    trainer.compute_loss = with_other_padding


def shift_scores(model: Any, tokenizer: Any, references: Sequence[str]) -> float:
    """Shift scores so that texts score 0 on average; the shift is saved in the configuration.

    Kedge adds it wherever it loads the model (``kedge.rewards``).  A second call replaces
    the shift.

    Returns:
        The shift.
    """
    if not len(references):
        raise DataError("references must hold at least one text to shift scores by")
    was_training = model.training
    setattr(model.config, SHIFT, 0.0)
    scores = RewardModel(model).score_texts(list(references), tokenizer)
    model.train(was_training)
    shift = -float(scores.double().mean())
    setattr(model.config, SHIFT, shift)
    return shift
