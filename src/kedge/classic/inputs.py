"""Padded model inputs from queries and responses, response masks, and the data loader."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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


def model_inputs(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    *,
    pad: int,
    start: int | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Right-padded ids and masks int64, as a model's forward takes them.

    Args:
        queries: int64 [P_i] each.
        responses: int64 [R_i] each.
        pad: padding token id.
        start: an encoder-decoder's start token; None: decoder only.
        device: of the result.
    """
    if start is None:
        rows = [torch.cat([q, r.to(q)]) for q, r in zip(queries, responses, strict=True)]
        ids, mask = _padded(rows, pad, device)
        return {"input_ids": ids, "attention_mask": mask}
    ids, mask = _padded(queries, pad, device)
    decoder, decoder_mask = _padded([begun(r, start) for r in responses], pad, device)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": decoder,
        "decoder_attention_mask": decoder_mask,
    }


def collated(
    collator: Any,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    *,
    start: int | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """``model_inputs``, padded by a transformers collator (list of dictionaries -> batch)."""

    def batch(rows: Sequence[Tensor]) -> dict[str, Tensor]:
        features = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in rows]
        return {k: v.to(device) for k, v in collator(features).items() if k != "labels"}

    if start is None:
        return batch([torch.cat([q, r.to(q)]) for q, r in zip(queries, responses, strict=True)])
    decoder = batch([begun(r, start) for r in responses])
    return batch(queries) | {
        "decoder_input_ids": decoder["input_ids"],
        "decoder_attention_mask": decoder["attention_mask"],
    }


def begun(response: Tensor, start: int | None) -> Tensor:
    """A response int64 [R] that begins with the decoder's start token, if there is one."""
    if start is None or (len(response) > 0 and int(response[0]) == start):
        return response
    return torch.cat([response.new_tensor([start]), response])


def _padded(rows: Sequence[Tensor], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = pad_sequence([r.long() for r in rows], batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(r) for r in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return ids.to(device), mask.to(device)


def response_mask(
    inputs: Mapping[str, Tensor],
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    masks: Sequence[Tensor] | None,
    *,
    start: int | None,
) -> Tensor:
    """Int64 [B, T]: 1 where the token at t + 1 of the (decoder's) inputs is in the response.

    Args:
        inputs: with an ``attention_mask``, padded on either side.
        queries: int64 [P_i] each.
        responses: int64 [R_i] each.
        masks: [R_i] each, of the trained tokens; None: all.
        start: see ``model_inputs``.
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


_KEPT = ("label", "query", "response")


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
            self._signature_columns = list(dict.fromkeys([*read, "input_ids", *_KEPT]))

    def _remove_unused_columns(self, dataset: Dataset) -> Dataset:
        """The dataset without unused columns, if ``remove_unused_columns``."""
        if not self.config.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        read = self._signature_columns or ()
        return dataset.remove_columns([n for n in dataset.column_names if n not in read])
