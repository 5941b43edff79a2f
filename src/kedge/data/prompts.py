"""Prompts of each training step, from a dataset."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.data.encode import (
    CHUNK,
    EncodedPrompts,
    PromptReport,
    Table,
    encode_prompts,
    read_table,
)
from kedge.records.errors import ConfigError, DataError
from kedge.records.types import PromptBatch

logger = logging.getLogger(__name__)


class DatasetPrompts:
    """Prompts drawn from a dataset; every batch is a pure function of the step.

    Prompt ``i`` of the run (``i = step * prompts_per_step + slot``) is entry ``i mod N`` of a
    permutation drawn separately for each pass ``i div N`` over the N prompts, so a batch may span
    passes and a dataset smaller than a batch repeats.  All ranks see slices of one global batch.

    Column ``input_ids`` is used unchanged; else ``prompt``, else ``query`` is tokenized: text with
    the tokenizer's special tokens (except an appended EOS), chat messages with its chat template.
    Padding in ``input_ids`` is marked by column ``attention_mask``; without it every id is real.
    All other columns are passed along in ``PromptBatch.columns``, with the raw prompt under
    ``"prompt"``.

    Args:
        dataset: a ``datasets.Dataset``, list of dicts, dict of columns, or map-style torch dataset.
        tokenizer: tokenizer of the policy.  Without a pad token, EOS fills padding; masks mark it.
        prompts_per_step: prompts in a step, over all ranks.
        num_generations: consecutive rows per prompt.
        rank: this process, in ``[0, world_size)``.
        world_size: number of processes; divides ``prompts_per_step * num_generations``.
        seed: seed of the permutations.
        shuffle: False keeps the dataset's order in every pass.
        max_prompt_length: tokens; longer prompts are dropped, or truncated to their last ones.
        overlong: ``"drop"`` or ``"truncate"``.
        chat_template_kwargs: passed on to ``apply_chat_template``.
        data_collator: called with ``[{"input_ids": ..., "attention_mask": ...}]``, one dict per
            prompt of the global batch, instead of Kedge's own padding; must be pure and return
            both keys.  Real tokens are moved to the right end of the row afterwards.
        dataset_num_proc: processes that tokenize a ``datasets.Dataset``.
        columns: dataset columns to pass along; None passes all.

    Raises:
        ConfigError: the rows of a step cannot be divided among the ranks.
        DataError: the dataset cannot be used as prompts.
    """

    def __init__(  # noqa: PLR0913
        self,
        dataset: Any,
        tokenizer: Any,
        *,
        prompts_per_step: int,
        seed: int,
        num_generations: int = 1,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        max_prompt_length: int | None = None,
        overlong: Literal["drop", "truncate"] = "drop",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
        dataset_num_proc: int | None = None,
        columns: Collection[str] | None = None,
    ) -> None:
        rows = prompts_per_step * num_generations
        if rows % world_size:
            down = rows // world_size * world_size
            raise ConfigError(
                f"world_size={world_size} does not divide the step's {rows} rows"
                f" ({prompts_per_step} prompts x {num_generations} each); nearest row counts that"
                f" do: {max(down, world_size)}, {down + world_size}"
            )
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's tokenizer
        self._encode = partial(
            encode_prompts,
            tokenizer=self._tokenizer,
            max_length=max_prompt_length,
            overlong=overlong,
            chat_template_kwargs=chat_template_kwargs or {},
            num_proc=dataset_num_proc,
        )
        self._drop_above = max_prompt_length if overlong == "drop" else None
        self._collate = data_collator
        self._per_step, self._repeat = prompts_per_step, num_generations
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle = seed, shuffle
        self._pad = pad_id(self._tokenizer)
        if self._tokenizer.pad_token_id is None:
            logger.warning(
                "the tokenizer has no pad token: padding is filled with token %d (EOS, or 0 without"
                " one); masks mark the padding, so EOS is still learned",
                self._pad,
            )
        self._orders: dict[int, Tensor] = {}
        self._table, self._prompts = self._read(dataset)
        self.keep(columns)

    def _read(self, dataset: Any) -> tuple[Table, EncodedPrompts]:
        table = read_table(dataset)
        return table, self._encode(table)

    def keep(self, columns: Collection[str] | None) -> None:
        """Pass along only these dataset columns and the prompt; None: all."""
        self._names = [
            name
            for name in self._table.names
            if name not in ("input_ids", "attention_mask")
            and (columns is None or name in columns or name in ("prompt", "query"))
        ]

    def __len__(self) -> int:
        """Prompts in one pass."""
        return len(self._prompts)

    @property
    def columns(self) -> list[str]:
        """Columns of the dataset."""
        return list(self._table.names)

    @property
    def report(self) -> PromptReport:
        """Number of rows, dropped and truncated prompts, and the longest prompt kept."""
        return self._prompts.report

    @property
    def lengths(self) -> Tensor:
        """Tokens of every prompt kept, int64 [N]."""
        return self._prompts.starts.diff()

    def check_tokens(self, known: int) -> None:
        """Reject prompts with token ids of ``known`` or above.

        Raises:
            DataError: naming the row and the token.
        """
        over = (self._prompts.tokens >= known).nonzero()
        if not len(over):
            return
        at = int(over[0])
        row = int(self._prompts.rows[int((self._prompts.starts <= at).sum()) - 1])
        raise DataError(
            f"row {row} of the dataset holds token {int(self._prompts.tokens[at])}, but the model's"
            f" vocabulary has {known} tokens; use the tokenizer that belongs to the model, or after"
            " adding tokens call model.resize_token_embeddings(len(tokenizer))"
        )

    def values(self, column: str) -> Iterator[tuple[int, Any]]:
        """The number of each row of the dataset, and its value in a column; None without one."""
        for start in range(0, len(self._table), CHUNK):
            rows = range(start, min(start + CHUNK, len(self._table)))
            names = [column] if column in self._table.names else []
            found = self._table.take(rows, names).get(column, [None] * len(rows))
            yield from zip(rows, found, strict=True)

    def fingerprint(self) -> str:
        """A short hash of every prompt's tokens, in order."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self._prompts.tokens, self._prompts.starts):
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()

    def batch(self, step: int) -> PromptBatch:
        """This rank's rows of training step ``step`` (0 is the first)."""
        first = step * self._per_step
        places = [divmod(first + slot, len(self._prompts)) for slot in range(self._per_step)]
        return self._batch_of(
            torch.tensor([int(self._order(turn)[offset]) for turn, offset in places])
        )

    def _batch_of(self, chosen: Tensor) -> PromptBatch:
        """This rank's rows of a batch of these prompts, int64 [prompts of all ranks]."""
        ids, mask = self._pad_prompts(chosen)
        local = self._per_step * self._repeat // self._world_size
        row = torch.arange(self._rank * local, (self._rank + 1) * local)
        group = row // self._repeat
        return PromptBatch(
            ids=ids[group],
            mask=mask[group],
            group=group,
            row=row,
            columns=self._columns(chosen, group.tolist()),
        )

    def whole(self) -> DatasetPrompts:
        """The same prompts, of which each step has the rows of all ranks."""
        whole = copy.copy(self)
        whole._rank, whole._world_size = 0, 1
        return whole

    def _order(self, turn: int) -> Tensor:
        order = self._orders.get(turn)
        if order is None:  # the sampling thread may run this, too
            order = torch.arange(len(self._prompts))
            if self._shuffle:
                key = f"prompts/{self._seed}/{turn}".encode()
                digest = hashlib.blake2b(key, digest_size=8).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
                order = torch.randperm(len(order), generator=generator)
            if len(self._orders) > 3:
                self._orders.clear()
            self._orders[turn] = order
        return order

    def _pad_prompts(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        if self._collate is not None:
            return self._collate_prompts(chosen, self._collate)
        tokens = [self._prompts.tokens_of(index) for index in chosen.tolist()]
        lengths = torch.tensor([len(row) for row in tokens])
        width = int(lengths.max())
        mask = torch.arange(width) >= (width - lengths)[:, None]
        ids = torch.full(mask.shape, self._pad)
        ids[mask] = torch.cat(tokens)
        return ids, mask

    def _collate_prompts(
        self, chosen: Tensor, collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]]
    ) -> tuple[Tensor, Tensor]:
        tokens = [self._prompts.tokens_of(index).tolist() for index in chosen.tolist()]
        collated = collate([{"input_ids": t, "attention_mask": [1] * len(t)} for t in tokens])
        names = ("input_ids", "attention_mask")
        ids, mask = (torch.as_tensor(collated.get(n, [])) for n in names)
        real = mask.bool()
        shaped = ids.shape == mask.shape and ids.dim() == 2 and len(ids) == len(tokens)
        if not (shaped and bool(real.any(1).all())):
            raise DataError(
                "data_collator must return input_ids and attention_mask [prompts, tokens], each row"
                f" with a real token; it returned {', '.join(collated)} of shapes"
                f" {tuple(ids.shape)} and {tuple(mask.shape)} for {len(tokens)} prompts"
            )
        order = real.long().argsort(dim=1, stable=True)  # padding first, tokens in order
        return ids.gather(1, order), real.gather(1, order)

    def _columns(self, chosen: Tensor, slots: list[int]) -> dict[str, list[Any]]:
        first, last = slots[0], slots[-1]
        local = chosen[first : last + 1]
        columns = self._table.take(self._prompts.rows[local].tolist(), self._names)
        if "prompt" not in columns:
            columns["prompt"] = (
                columns["query"]
                if "query" in columns
                else self._tokenizer.batch_decode(
                    [self._prompts.tokens_of(index) for index in local.tolist()],
                    skip_special_tokens=True,
                )
            )
        return {name: [values[slot - first] for slot in slots] for name, values in columns.items()}


def pad_id(tokenizer: Any) -> int:
    """The id that pads prompts and responses; masks never depend on it."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in ids if token is not None)
