"""Datasets as tables, and all their prompts as token ids, before training."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.chat_template import (
    OPTIONS,
    TOOLS,
    generation_options,
    render_chat,
    template_options,
)
from kedge.data.rows import exact_columns
from kedge.records.errors import DataError

logger = logging.getLogger(__name__)
CHUNK = 10_000  # rows tokenized at a time
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
Encode = Callable[[dict[str, list[Any]], Sequence[int]], dict[str, Any]]
SOURCES = ("input_ids", "prompt", "query")  # the first one present is used


class ColumnTable:
    """Named columns of equal length in memory."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        for name in columns:
            if not isinstance(name, str):
                raise DataError(f"the dataset's column names must be text, got {name!r}")
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the dataset's columns must have the same length, got {lengths}")
        self._columns, self.names = columns, list(columns)
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def take(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        """The given columns of the given rows, as plain Python values."""
        return {name: [self._columns[name][row] for row in rows] for name in names}


class ArrowTable:
    """A ``datasets.Dataset``, left on disk and read in slices."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format(None)
        self.names: list[str] = list(dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        """The given columns of the given rows, as plain Python values."""
        if not names:
            return {}
        try:
            index = rows if isinstance(rows, range) else list(rows)  # a range is read as a slice
            columns = self.dataset.select_columns(list(names))[index]
        except Exception as error:  # for example a damaged file or a lost disk
            raise DataError(
                f"rows of the dataset cannot be read: {type(error).__name__}: {error}"
            ) from error
        return exact_columns(columns, self.dataset.features)


Table = ColumnTable | ArrowTable


def read_table(dataset: Any) -> Table:
    """A table over a datasets.Dataset, a list of dicts, a dict of columns or a torch dataset."""
    kind = type(dataset).__name__
    if isinstance(dataset, (str, type(None))):
        raise DataError(
            f"the dataset is {dataset!r}; load it first, for example"
            " datasets.load_dataset('json', data_files='prompts.jsonl', split='train')"
        )
    if isinstance(dataset, Mapping):
        return _read_columns(dataset)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
            raise DataError(f"a dataset must be a datasets.Dataset or a list of dicts, got {kind}")
        raise DataError(
            f"the dataset is a {kind}, a stream without row indices, so a resumed run could not"
            " read the same prompts again; load the rows you need into memory first, for example"
            " datasets.Dataset.from_list(list(stream.take(100_000)))"
        )
    if hasattr(dataset, "with_format") and dataset.format["type"] != "custom":
        return ArrowTable(dataset)
    return _read_rows(dataset)


def _read_rows(dataset: Any) -> ColumnTable:
    rows, kind = list[Mapping[str, Any]](), type(dataset).__name__
    for number in range(len(dataset)):
        try:
            row = dataset[number]
        except Exception as error:  # the user's class may raise anything
            raise DataError(
                f"row {number} of the dataset, a {kind}, cannot be read:"
                f" {type(error).__name__}: {error}; pass a datasets.Dataset (for a pandas frame:"
                " datasets.Dataset.from_pandas(frame)) or a list of dicts"
            ) from error
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of the dataset ({kind}) must be a dict such as {{'prompt': text}},"
                f" got {type(row).__name__}"
            )
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return ColumnTable(exact_columns(columns, getattr(dataset, "features", None) or {}))


def _read_columns(columns: Mapping[str, Any]) -> ColumnTable:
    if any(hasattr(split, "column_names") for split in columns.values()):
        raise DataError(
            f"the dataset is a {type(columns).__name__} with the splits"
            f" {', '.join(map(str, columns))}; pass one of them"
        )
    lists = {n: x.tolist() if hasattr(x, "tolist") else x for n, x in columns.items()}
    for name, values in lists.items():
        if isinstance(values, str) or not hasattr(values, "__getitem__"):
            raise DataError(
                f"column {name!r} must be a list, got {type(values).__name__}; a dict maps"
                " column names to lists (pass a single row as [row])"
            )
    features = {name: getattr(x, "features", None) for name, x in columns.items()}
    return ColumnTable(exact_columns(lists, features))  # a datasets.Column has features


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """How many rows of the dataset were kept, dropped and truncated."""

    rows: int  # in the dataset
    dropped: int  # prompts longer than max_prompt_length that were left out
    truncated: int  # prompts longer than max_prompt_length whose first tokens were cut off
    longest: int  # tokens of the longest prompt kept


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompts:
    """Token ids of all prompts, concatenated."""

    tokens: Tensor  # int32 [total]
    starts: Tensor  # int64 [N + 1]; prompt i is tokens[starts[i] : starts[i + 1]]
    rows: Tensor  # int64 [N]; row of the dataset
    report: PromptReport

    def __len__(self) -> int:
        return self.rows.numel()

    def tokens_of(self, index: int) -> Tensor:
        """Token ids of one prompt, int64 [length]."""
        return self.tokens[int(self.starts[index]) : int(self.starts[index + 1])].long()


def prompt_column(table: Table) -> str:
    """The column that holds the prompts: ``input_ids``, else ``prompt``, else ``query``."""
    for name in SOURCES:
        if name in table.names:
            return name
    columns = ", ".join(map(repr, table.names)) or "none"
    raise DataError(
        f"the dataset has no prompts: its columns are {columns}. It needs 'prompt' or 'query' (text"
        " or chat messages) or 'input_ids' (token ids); rename the column that holds the prompts"
    )


def encode_prompts(
    table: Table,
    tokenizer: Any,
    *,
    max_length: int | None,
    overlong: Literal["drop", "truncate"],
    chat_template_kwargs: Mapping[str, Any],
    num_proc: int | None,
) -> EncodedPrompts:
    """Tokenize every prompt of ``table``; raises DataError if one is unfit, or none is left."""
    if len(table) == 0:
        raise DataError("the dataset is empty; it needs at least one prompt")
    column = prompt_column(table)
    if column == "input_ids":
        names = [name for name in (column, "attention_mask") if name in table.names]
        chunks = _chunks(table, names, _read_ids, num_proc)
        return _collect(chunks, len(table), max_length, overlong)
    first = table.take([0], [column])[column][0]
    if is_chat(first) and not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"column {column!r} holds chat messages, but the tokenizer has no chat template;"
            " set tokenizer.chat_template, or pass the prompts as text"
        )
    prepends_bos, appends_eos = added_tokens(tokenizer)
    encode = partial(
        _tokenize,
        column=column,
        tokenizer=tokenizer,
        template=dict(chat_template_kwargs),
        drop_eos=appends_eos,
    )
    shown = [name for name in (TOOLS, OPTIONS) if name in table.names and is_chat(first)]
    chunks = _chunks(table, [column, *shown], encode, num_proc)
    if prepends_bos:
        chunks = _with_one_bos(chunks, tokenizer.bos_token_id)
    encoded = _collect(chunks, len(table), max_length, overlong)
    if encoded.report.truncated and is_chat(first):
        logger.warning(
            "the %d truncated prompts are chat messages: what the chat template renders first (a"
            " system message, the header of a role) is cut off; overlong_prompts='drop' leaves them"
            " out",
            encoded.report.truncated,
        )
    return encoded


def added_tokens(tokenizer: Any) -> tuple[bool, bool]:
    """Whether a tokenizer prepends its BOS token to every text, and appends its EOS token."""
    ids, bare = (
        tokenizer("a", **options)["input_ids"] for options in ({}, {"add_special_tokens": False})
    )
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    prepends = bos is not None and ids[:1] == [bos] and bare[:1] != [bos]
    appends = eos is not None and len(ids) > 1 and ids[-1] == eos and bare[-1:] != [eos]
    return prepends, appends


def _with_one_bos(chunks: Iterable[list[list[int]]], bos: int) -> Iterable[list[list[int]]]:
    """Drop the BOS that the tokenizer prepended to a text that already began with one."""
    total = 0
    for chunk in chunks:
        double_bos = [ids[:2] == [bos, bos] for ids in chunk]
        total += sum(double_bos)
        yield [ids[1:] if drop else ids for ids, drop in zip(chunk, double_bos, strict=True)]
    if total:
        logger.warning(
            "%d prompts already begin with the BOS token (already rendered by a chat template?);"
            " the second BOS was removed",
            total,
        )


def _chunks(
    table: Table, names: list[str], encode: Encode, num_proc: int | None
) -> Iterable[list[list[int]]]:
    if isinstance(table, ArrowTable) and num_proc is not None and num_proc > 1:
        done = table.dataset.select_columns(names).map(
            partial(_encode_exact, encode=encode, features=table.dataset.features),
            batched=True,
            with_indices=True,
            num_proc=min(num_proc, len(table)),
            remove_columns=[name for name in names if name != "input_ids"],
        )
        for start in range(0, len(done), CHUNK):
            yield done[start : start + CHUNK]["input_ids"]
        return
    for start in range(0, len(table), CHUNK):
        rows = range(start, min(start + CHUNK, len(table)))
        yield encode(table.take(rows, names), rows)["input_ids"]


def _encode_exact(
    columns: Mapping[str, list[Any]], rows: Sequence[int], *, encode: Encode, features: Any
) -> dict[str, Any]:
    return encode(exact_columns(columns, features), rows)


def _collect(
    chunks: Iterable[list[list[int]]],
    rows: int,
    max_length: int | None,
    overlong: Literal["drop", "truncate"],
) -> EncodedPrompts:
    tokens, starts, kept = array("i"), [0], list[int]()
    truncated = longest = 0
    for row, ids in enumerate(chain.from_iterable(chunks)):
        if not ids:
            raise DataError(
                f"row {row} of the dataset is an empty prompt (no token); remove such rows,"
                " or use a tokenizer that prepends a BOS token to every text"
            )
        longest = max(longest, len(ids))
        over = max_length is not None and len(ids) > max_length
        if over and overlong == "drop":
            continue
        truncated += over
        tokens.extend(ids[-max_length:] if over and max_length else ids)
        starts.append(len(tokens))
        kept.append(row)
    if not kept:
        raise DataError(
            f"all {rows} prompts are longer than max_prompt_length={max_length} tokens (the longest"
            f" has {longest}); raise it, or set overlong_prompts='truncate'"
        )
    dropped, lengths = rows - len(kept), torch.tensor(starts).diff()
    if dropped or truncated:
        logger.warning(
            "of %d prompts, %d were dropped and %d truncated to their last %s tokens",
            *(rows, dropped, truncated, max_length),
        )
    return EncodedPrompts(
        tokens=torch.frombuffer(tokens, dtype=torch.int32),
        starts=torch.tensor(starts),
        rows=torch.tensor(kept),
        report=PromptReport(
            rows=rows, dropped=dropped, truncated=truncated, longest=int(lengths.max())
        ),
    )


def is_chat(prompt: object) -> bool:
    """Whether ``prompt`` is a non-empty list of ``{"role": ..., "content": ...}`` messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def _tokenize(
    columns: dict[str, list[Any]],
    rows: Sequence[int],
    *,
    column: str,
    tokenizer: Any,
    template: dict[str, Any],
    drop_eos: bool,
) -> dict[str, Any]:
    prompts = columns[column]
    chat = is_chat(prompts[0])
    texts: list[str] = []
    for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        if not (is_chat(prompt) if chat else isinstance(prompt, str)):
            want = "chat messages" if chat or isinstance(prompt, (list, tuple)) else "text"
            raise DataError(
                f"column {column!r}, row {row}: expected {want}, got"
                f" {type(prompt).__name__} {repr(prompt)[:80]}; every row must hold text, or every"
                " row a list of {'role': ..., 'content': ...} messages"
            )
        text = prompt
        if chat:
            shown = {n: columns[n][at] for n in (TOOLS, OPTIONS) if n in columns}
            options = generation_options(prompt) | template
            options |= template_options(shown, where=f"row {row}")
            text = render_chat(tokenizer, prompt, where=f"column {column!r}, row {row}", **options)
        lone = None if text.isascii() else LONE_SURROGATE.search(text)
        if lone is not None:  # the tokenizer fails on any Unicode surrogate
            raise DataError(
                f"column {column!r}, row {row}: character {lone.start()} is the lone surrogate"
                f" {lone.group()!r}, which UTF-8 cannot encode; fix it, for example with"
                " text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
            )
        texts.append(text)
    ids = tokenizer(texts, add_special_tokens=not chat)["input_ids"]
    return {"input_ids": [one[:-1] for one in ids] if drop_eos and not chat else ids}


def _read_ids(columns: dict[str, list[Any]], rows: Sequence[int]) -> dict[str, Any]:
    ids = columns["input_ids"]
    masks = columns.get("attention_mask")
    prompts = []
    for at, (row, prompt_ids) in enumerate(zip(rows, ids, strict=True)):
        try:
            valid = all(int(token) == token and token >= 0 for token in prompt_ids)
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise DataError(
                f"column 'input_ids', row {row}: expected a list of token ids (integers >= 0),"
                f" got {type(prompt_ids).__name__} {repr(prompt_ids)[:80]}"
            )
        mask = [1] * len(prompt_ids) if masks is None else masks[at]
        if mask is None or len(mask) != len(prompt_ids):
            raise DataError(
                f"row {row} of the dataset: attention_mask and input_ids must have the same length"
            )
        prompts.append([int(x) for x, real in zip(prompt_ids, mask, strict=True) if real])
    return {"input_ids": prompts}
