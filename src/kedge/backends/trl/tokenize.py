"""Tokenizes texts for TRL's trainers in batches, with the columns that TRL would add.

TRL passes over the rows up to five times and calls the tokenizer once or twice for each; where the
columns are there, it leaves the rows as they are.  Chats, and options that change what is
tokenized, are left to TRL.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

_OPTIONS = (  # fields of TRL's configurations that change the tokens or the labels
    *("packing", "assistant_only_loss", "dataset_kwargs", "chat_template_path", "eos_token"),
)
_COLUMNS = {"prompt", "completion", "chosen", "rejected", "margin"}


def tokenize_rows(train: Any, test: Any, tokenizer: Any, config: Any) -> tuple[Any, Any, Any]:
    """Training rows, evaluation rows or None, and configuration, with the tokens of all texts.

    Prompts and completions get ``input_ids`` and ``labels`` (-100 on the prompt); preferences get
    ``chosen_ids`` and ``rejected_ids``.  Each text ends with the EOS token.  What cannot be done
    here, such as cutting long texts, is left to TRL: all three are returned as they are.

    Args:
        train: a ``datasets.Dataset``.
        test: the same, or None.
        tokenizer: a tokenizer of texts.
        config: ``trl.SFTConfig`` or ``trl.RewardConfig``.
    """
    unchanged = (train, test, config)
    special = any(getattr(config, name, None) not in (None, False) for name in _OPTIONS)
    if special or getattr(config, "completion_only_loss", None) is not None:
        return unchanged
    tokenized = []
    for rows in (train, test):
        result = None if rows is None else _tokenized(rows, tokenizer, config)
        if rows is not None and result is None:
            return unchanged
        tokenized.append(result)
    config = copy.copy(config)
    config.max_length = None  # no text is longer, and TRL would pass over the rows again
    return tokenized[0], tokenized[1], config


def _tokenized(rows: Any, tokenizer: Any, config: Any) -> Any:
    """The rows with their tokens; None if TRL must do it."""
    columns = set(getattr(rows, "column_names", ()))
    if not tokenizer.eos_token or not _are_texts(rows, columns):
        return None
    pairs = {"chosen", "rejected"} <= columns
    tokenized = rows.map(
        _preference if pairs else _completion,
        fn_kwargs={"tokenizer": tokenizer},
        batched=True,
        num_proc=config.dataset_num_proc,
        desc="Tokenizing",
    )
    names = ("chosen_ids", "rejected_ids") if pairs else ("input_ids", "labels")
    lengths = [len(ids) for name in names for ids in tokenized[name]]
    too_long = config.max_length is not None and max(lengths, default=0) > config.max_length
    # No labels: the tokens of the prompt are not those with which the whole text begins.
    return None if too_long or 0 in lengths else tokenized


def _are_texts(rows: Any, columns: set[str]) -> bool:
    """Whether rows are texts: prompts and completions, or preferences."""
    accepted = ({"prompt", "completion"}, {"chosen", "rejected"})
    if not hasattr(rows, "features") or not columns <= _COLUMNS:
        return False
    if sum(names <= columns for names in accepted) != 1 or rows.format["type"] is not None:
        return False
    kinds = {getattr(rows.features[name], "dtype", None) for name in columns - {"margin"}}
    return kinds == {"string"}


def _completion(batch: dict[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    texts = _joined(batch["prompt"], batch["completion"], tokenizer.eos_token)
    prompts, whole = (tokenizer(x)["input_ids"] for x in (batch["prompt"], texts))
    labels = []
    for prompt, ids in zip(prompts, whole, strict=True):
        rest = ids[len(prompt) :] if ids[: len(prompt)] == prompt else []
        labels.append([-100] * len(prompt) + rest if rest else [])
    return {"input_ids": whole, "labels": labels}


def _preference(batch: dict[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    prompts = batch.get("prompt", [""] * len(batch["chosen"]))
    return {
        f"{name}_ids": tokenizer(_joined(prompts, batch[name], tokenizer.eos_token))["input_ids"]
        for name in ("chosen", "rejected")
    }


def _joined(prompts: Sequence[str], answers: Sequence[str], eos: str) -> list[str]:
    return [
        prompt + (answer if answer.endswith(eos) else answer + eos)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
