"""Batches of queries from a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from kedge.classic.config import PPOConfig
from kedge.errors import ConfigError, DataError

_KEPT = ("label", "query", "response")


def as_lists(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns; ``input_ids`` as a list of int64 [P_i], ready for ``generate``."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if "input_ids" in columns:
        columns["input_ids"] = [torch.as_tensor(x, dtype=torch.long) for x in columns["input_ids"]]
    return columns


def make_dataloader(
    dataset: Any, config: PPOConfig, model: Any, tokenizer: Any, collator: Any
) -> DataLoader[Any]:
    """Shuffled whole batches of ``config.batch_size`` rows; see ``PPOTrainer``.

    Raises:
        ConfigError: not a dataset.
        DataError: fewer rows than a batch has, or neither "input_ids" nor "query".
    """
    if not isinstance(dataset, Dataset | TorchDataset):
        raise ConfigError(
            f"dataset is a {type(dataset).__name__}; pass a datasets.Dataset or a torch Dataset"
        )
    if isinstance(dataset, Dataset):
        dataset = _prepared(dataset, config, model, tokenizer)
    streams = isinstance(dataset, IterableDataset)
    if not streams and len(dataset) < config.batch_size:
        raise DataError(
            f"the dataset has {len(dataset)} rows, fewer than "
            f"batch_size={config.batch_size}: it has no whole batch"
        )
    return DataLoader(
        dataset,
        batch_size=config.batch_size,
        collate_fn=collator or as_lists,
        shuffle=not streams,
        drop_last=True,
    )


def _prepared(dataset: Dataset, config: PPOConfig, model: Any, tokenizer: Any) -> Dataset:
    names = dataset.column_names
    if "input_ids" not in names and "query" in names:
        dataset = dataset.map(
            lambda row: {"input_ids": tokenizer.encode(row["query"])},
            num_proc=config.dataset_num_proc,
        )
    elif "input_ids" not in names:
        raise DataError(
            f"the dataset has the columns {', '.join(names)}; it needs a text column 'query' or "
            "token ids in 'input_ids'"
        )
    if not config.remove_unused_columns:
        return dataset
    read = {*inspect.signature(model.pretrained_model.forward).parameters, "input_ids", *_KEPT}
    return dataset.remove_columns([n for n in dataset.column_names if n not in read])
