"""Batches of queries from a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from kedge.classic.config import PPOConfig
from kedge.errors import ConfigError, DataError

_KEPT = ("label", "query", "response")


def as_lists(rows: Sequence[Any]) -> Any:
    """Rows as columns; ``input_ids`` as a list of int64 [P_i], ready for ``generate``.

    Rows that are no dictionaries, such as tuples of tensors, are stacked as torch does it.
    """
    if not isinstance(rows[0], Mapping):
        return default_collate(list(rows))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if "input_ids" in columns:
        columns["input_ids"] = [torch.as_tensor(x, dtype=torch.long) for x in columns["input_ids"]]
    return columns


class Batches:
    """Batches of a dataset, for the trainer's ``dataloader``."""

    config: PPOConfig
    model: Any
    tokenizer: Any
    _signature_columns: list[str] | None = None

    def prepare_dataloader(self, dataset: Any, data_collator: Any = None) -> DataLoader[Any]:
        """Shuffled batches of ``batch_size`` rows; an incomplete last batch is left out.

        A dataset with a text column "query" and no "input_ids" is tokenized.

        Raises:
            ConfigError: not a dataset.
            DataError: fewer rows than a batch has, or neither "input_ids" nor "query".
        """
        if not isinstance(dataset, Dataset | TorchDataset):
            raise ConfigError(
                f"dataset is a {type(dataset).__name__}; pass a datasets.Dataset or a torch Dataset"
            )
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(self._with_ids(dataset))
        streams = isinstance(dataset, IterableDataset)
        size = self.config.batch_size
        if not streams and len(dataset) < size:
            raise DataError(
                f"the dataset has {len(dataset)} rows, fewer than batch_size={size}: it has no "
                "whole batch"
            )
        return DataLoader(
            dataset,
            batch_size=size,
            collate_fn=data_collator or as_lists,
            shuffle=not streams,
            drop_last=True,
        )

    def _with_ids(self, dataset: Dataset) -> Dataset:
        names = dataset.column_names
        if "input_ids" in names:
            return dataset
        if "query" not in names:
            raise DataError(
                f"the dataset has the columns {', '.join(names)}; it needs a text column 'query' "
                "or token ids in 'input_ids'"
            )
        return dataset.map(
            lambda row: {"input_ids": self.tokenizer.encode(row["query"])},
            num_proc=self.config.dataset_num_proc,
        )

    def _set_signature_columns_if_needed(self) -> None:
        """Fill ``_signature_columns`` with the columns that the model or the loop reads."""
        if self._signature_columns is None:
            read = inspect.signature(self.model.pretrained_model.forward).parameters
            self._signature_columns = list(dict.fromkeys([*read, "input_ids", *_KEPT]))

    def _remove_unused_columns(self, dataset: Dataset) -> Dataset:
        """The dataset without columns that nothing reads, if ``remove_unused_columns``."""
        if not self.config.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        read = self._signature_columns or ()
        return dataset.remove_columns([n for n in dataset.column_names if n not in read])
