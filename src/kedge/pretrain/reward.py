"""Trains reward models from preferences, with the details that PPO relies on.

Huang et al. 2024 (arXiv:2403.17031), details on reward models; Stiennon et al. 2020
(arXiv:2009.01325), appendix B.1: the head is initialized with standard deviation
1 / sqrt(hidden + 1), and after training the score is shifted so that demonstration answers score 0
on average.

The trained model is checked on held-out pairs, and on answers without an end, since a
policy finds what its reward model does not see.  Accuracy over all pairs hides a kind of mistake
that the model cannot tell from a right answer, and preferences hold finished answers alone, so the
score of an unfinished one is an extrapolation, often upwards.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge.errors import ConfigError, DataError
from kedge.pretrain.supervised import train_with_kernels
from kedge.rewards.model import SHIFT, RewardModel, save_adapter_shift

KIND = "kind"  # column of the kind of a pair
FILE = "held_out.json"
FEWEST = 20  # pairs needed to judge a kind
OFTEN = 0.1  # share of unfinished answers that beat the finished one


def init_head(model: nn.Module, *, seed: int = 0) -> None:
    """Reinitialize the score head: standard deviation 1 / sqrt(hidden + 1), bias 0.

    Raises:
        ConfigError: the model has no layer that maps the last hidden state to the score.
    """
    layers = (getattr(model, name, None) for name in ("score", "classifier"))
    heads = (getattr(layer, "out_proj", layer) for layer in layers)
    head = next((head for head in heads if isinstance(head, nn.Linear)), None)
    if head is None:
        raise ConfigError(
            f"{type(model).__name__} has no score or classifier layer to reinitialize; use"
            " --no_fresh_head"
        )
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
            sys.stdout.write("".join(f"kedge: {line}\n" for line in describe(check)))
            sys.stdout.flush()
            text = json.dumps(check, indent=1) + "\n"
            Path(config.output_dir, FILE).write_text(text, encoding="utf-8")
    trained: Any = trainer.model
    if hasattr(trained, "peft_config"):
        save_adapter_shift(config.output_dir, getattr(trained.config, SHIFT, 0.0))
    tokenizer.save_pretrained(config.output_dir)
    return trainer


def _score_last_tokens(trainer: Any) -> None:
    """Score the last token of each row even if it is the padding token, such as EOS.

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


def check_reward_model(model: Any, rows: Any) -> dict[str, Any]:
    """Accuracy over held-out pairs and by kind of mistake, and scores of unfinished answers.

    Args:
        model: a sequence-classification model with one label.
        rows: tokenized pairs, ``chosen_ids`` and ``rejected_ids``, with or without ``kind``.
    """
    chosen, rejected = list(rows["chosen_ids"]), list(rows["rejected_ids"])
    unfinished = [_cut(a, b) for a, b in zip(chosen, rejected, strict=True)]
    source = RewardModel(model)
    better, worse, cut = (source.score_ids(ids) for ids in (chosen, rejected, unfinished))
    right = (better > worse).tolist()
    groups: dict[str, list[bool]] = {}
    for kind, one in zip(rows[KIND] if KIND in rows.column_names else [], right, strict=False):
        groups.setdefault(str(kind), []).append(one)
    kinds = {kind: _accuracy(groups[kind]) for kind in sorted(groups)}
    return {
        **_accuracy(right),
        "kinds": kinds,
        "blind": [k for k, a in kinds.items() if a["pairs"] >= FEWEST and a["low"] <= 0.5],
        "lowest_score": float(torch.cat([better, worse]).quantile(0.01)),
        "unfinished_higher": float((cut > better).float().mean()),
        "unfinished_score": float(cut.mean()),
        "finished_score": float(better.mean()),
    }


def _cut(answer: Sequence[int], other: Sequence[int]) -> list[int]:
    """The first half of the part that differs from the other answer, without the end."""
    same = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), 0)
    return list(answer[: max(1, min(same + (len(answer) - same + 1) // 2, len(answer) - 1))])


def _accuracy(right: list[bool]) -> dict[str, float]:
    """Share of correctly ordered pairs, and the lower end of its 95% interval (Wilson)."""
    n, z = len(right), 1.96
    share = sum(right) / n
    spread = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return {
        "pairs": n,
        "accuracy": share,
        "low": (share + z * z / (2 * n) - spread) / (1 + z * z / n),
    }


def describe(check: dict[str, Any]) -> list[str]:
    """Format the check as lines of text, with advice."""
    share, lowest = check["unfinished_higher"], math.floor(check["lowest_score"])
    lines = [f"on {check['pairs']} held-out pairs, {check['accuracy']:.1%} are in the right order"]
    for kind, one in check["kinds"].items():
        mark = "  not better than chance" if kind in check["blind"] else ""
        lines.append(f"  {kind:<20} {one['pairs']:>5} pairs  {one['accuracy']:>6.1%}{mark}")
    if check["blind"]:
        lines.append(
            f"the reward model does not see {', '.join(check['blind'])}, so RL will not avoid it:"
            " train on more such pairs, or longer"
        )
    lines.append(
        f"{share:.0%} of the answers score higher when they are cut short"
        f" (mean {check['unfinished_score']:.2f}, whole {check['finished_score']:.2f})"
    )
    if share > OFTEN:
        lines.append(
            "RL would learn not to end: replace the score of unfinished responses, with"
            f" --non_eos_penalty --penalty_reward_value {lowest}"
        )
    return lines
