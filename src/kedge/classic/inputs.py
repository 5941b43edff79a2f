"""Padded model inputs from queries and responses, response masks, and the data loader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from kedge.classic.config import PPOConfig
from kedge.errors import ConfigError, DataError


def pad_id(tokenizer: Any) -> int:
    """The padding token id; masks never depend on it."""
    pad = tokenizer.pad_token_id
    return int(pad if pad is not None else tokenizer.eos_token_id or 0)


def padded(rows: Sequence[Tensor], fill: int = 0, *, left: bool = False) -> Tensor:
    """Rows [n_i] as one tensor [B, max n], filled up on the right or left."""
    side = "left" if left else "right"
    return pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side=side)


def pad_right(pad: int, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Right-padded ids int64 [B, n] and their mask."""
    mask = padded([torch.ones_like(x, dtype=torch.long) for x in rows])
    return {"input_ids": padded([x.long() for x in rows], pad), "attention_mask": mask}


def collate(collator: Any, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Ids and mask padded by a transformers collator (list of dictionaries -> batch)."""
    batch = collator([{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in rows])
    return {name: x for name, x in batch.items() if name != "labels"}


def model_inputs(
    pad_rows: Callable[[Sequence[Tensor]], dict[str, Tensor]],
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    start: int | None,
) -> dict[str, Tensor]:
    """The inputs of a model's forward for queries int64 [P_i] and responses int64 [R_i].

    ``start`` is an encoder-decoder's start token; None: decoder only.
    """
    if start is None:
        return pad_rows([torch.cat([q, r.to(q)]) for q, r in zip(queries, responses, strict=True)])
    decoder = pad_rows([begun(r, start) for r in responses])
    return pad_rows(queries) | {
        "decoder_input_ids": decoder["input_ids"],
        "decoder_attention_mask": decoder["attention_mask"],
    }


def begun(response: Tensor, start: int | None) -> Tensor:
    """A response int64 [R] that begins with the decoder's start token, if there is one."""
    if start is None or (len(response) > 0 and int(response[0]) == start):
        return response
    return torch.cat([response.new_tensor([start]), response])


def response_mask(
    inputs: Mapping[str, Tensor],
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    masks: Sequence[Tensor] | None,
    *,
    start: int | None,
) -> Tensor:
    """Int64 [B, T]: 1 where the token at t + 1 of the (decoder's) inputs is in the response.

    ``inputs`` may be padded on either side; ``masks`` [R_i] select trained tokens, None: all.
    """
    whole = inputs["attention_mask" if start is None else "decoder_attention_mask"]
    out = torch.zeros_like(whole[:, 1:])
    for i, (row, query, response) in enumerate(zip(whole, queries, responses, strict=True)):
        first = int(row.argmax())  # left padding
        skip = int(start is not None and len(response) > 0 and int(response[0]) == start)
        begin = first + (len(query) - 1 if start is None else 0)
        count = len(response) - skip
        kept = torch.ones(count) if masks is None else masks[i][skip:]
        out[i, begin : begin + count] = kept.to(out)
    return out


def as_lists(rows: Sequence[Any]) -> Any:
    """Rows as columns; ``input_ids`` as a list of int64 [P_i], ready for ``generate``.

    Rows that are not dictionaries, such as tuples of tensors, use torch's default collation.
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
        """Shuffled batches of ``batch_size`` rows; an incomplete last batch is dropped.

        A dataset with a text column "query" and no "input_ids" is tokenized.

        Raises:
            ConfigError: ``dataset`` is not a dataset.
            DataError: fewer rows than ``batch_size``, or neither "input_ids" nor "query".
        """
        if not isinstance(dataset, Dataset | TorchDataset):
            raise ConfigError(
                "dataset must be a datasets.Dataset or a torch Dataset, got "
                f"{type(dataset).__name__}"
            )
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(self._with_ids(dataset))
        streams = isinstance(dataset, IterableDataset)
        size = self.config.batch_size
        if not streams and len(dataset) < size:
            raise DataError(
                f"the dataset has {len(dataset)} rows, fewer than batch_size={size}; add rows or "
                "lower batch_size"
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
                "the dataset must have a text column 'query' or token ids in 'input_ids'; its "
                f"columns: {', '.join(names)}"
            )
        return dataset.map(
            lambda row: {"input_ids": self.tokenizer.encode(row["query"])},
            num_proc=self.config.dataset_num_proc,
        )

    def _set_signature_columns_if_needed(self) -> None:
        """Fill ``_signature_columns`` with the columns that the model or the loop reads."""
        if self._signature_columns is None:
            read = inspect.signature(self.model.pretrained_model.forward).parameters
            self._signature_columns = [*read, "input_ids", "label", "query", "response"]

    def _remove_unused_columns(self, dataset: Dataset) -> Dataset:
        """The dataset without unused columns, if ``remove_unused_columns``."""
        if not self.config.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        read = self._signature_columns or ()
        return dataset.remove_columns([n for n in dataset.column_names if n not in read])
