"""Prompts of training and evaluation, from the datasets that a trainer gets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import vllm_limit
from kedge.data import DatasetPrompts
from kedge.data.stream import StreamPrompts, is_stream, read_stream
from kedge.loop.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.models.compatibility import check_length, vocabulary
from kedge.records.errors import ConfigError, DataError
from kedge.records.protocols import PromptSource
from kedge.trainers.options import prompt_options, size_options


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One set of evaluation prompts."""

    prefix: str  # "eval_" or "eval_<name>_"
    source: PromptSource
    batches: int
    rows: int  # total number of responses


def build_prompts(
    dataset: Any,
    args: OnPolicyConfig,
    tokenizer: Any,
    accelerator: Accelerator,
    *,
    min_group: int,
    collator: Any = None,
) -> tuple[DatasetPrompts, BatchSizes]:
    """Tokenize the training prompts, and derive every size of the run."""
    if dataset is None:
        raise DataError("train_dataset=None: pass a dataset with a `prompt` column")
    world_size = accelerator.num_processes
    options = size_options(args) | {"world_size": world_size, "min_group": min_group}
    # Sizes that cannot work are refused before minutes of tokenization, which tells how many
    # prompts there are.
    # A stream tells none, so it needs another end than num_train_epochs.
    stream = is_stream(dataset)
    draft = compute_batch_sizes(**options | ({} if stream else {"max_steps": 1}))
    if stream and (rounds := getattr(args, "dynamic_sampling", 0)):
        raise ConfigError(
            f"dynamic_sampling={rounds} takes other rows of the dataset by their number, and"
            f" train_dataset is a {type(dataset).__name__} without any; set dynamic_sampling=0, or"
            " pass a datasets.Dataset"
        )
    prompts = (StreamPrompts if stream else DatasetPrompts)(
        dataset,
        tokenizer,
        prompts_per_step=draft.prompts,
        num_generations=draft.group,
        shuffle=args.shuffle_dataset,
        data_collator=collator,
        **prompt_options(args, accelerator),
    )
    _check_same(prompts, "train_dataset", accelerator)
    return prompts, draft if stream else compute_batch_sizes(**options, dataset_rows=len(prompts))


def build_eval_sets(
    dataset: Any, args: OnPolicyConfig, tokenizer: Any, accelerator: Accelerator
) -> list[EvalSet]:
    """Build evaluation prompts from no dataset, one, or a dict of named ones."""
    if dataset is None:
        strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        if strategy != "no":
            raise ConfigError(
                f"eval_strategy={strategy!r} needs an eval_dataset; pass one, or set"
                " eval_strategy='no'"
            )
        if args.eval_against_start:
            raise ConfigError("eval_against_start=True needs an eval_dataset; pass one")
        return []
    named = {"eval_": dataset}
    if isinstance(dataset, Mapping) and not {"prompt", "query", "input_ids"} & set(dataset):
        named = {f"eval_{name}_": rows for name, rows in dataset.items()}
    per_batch = args.per_device_eval_batch_size * accelerator.num_processes
    sets, completions = [], args.num_generations_eval or 1
    for prefix, rows in named.items():
        if hasattr(rows, "__len__") and not len(rows):
            name = prefix.removeprefix("eval_").removesuffix("_")
            shown = f"[{name!r}]" if name else ""
            raise DataError(f"eval_dataset{shown} is empty; pass at least one prompt")
        source = DatasetPrompts(
            read_stream(rows) if is_stream(rows) else rows,
            tokenizer,
            prompts_per_step=per_batch,
            num_generations=completions,
            shuffle=False,
            **prompt_options(args, accelerator),
        )
        _check_same(source, "eval_dataset", accelerator)
        batches = math.ceil(len(source) / per_batch)
        sets.append(
            EvalSet(prefix=prefix, source=source, batches=batches, rows=len(source) * completions)
        )
    return sets


def _check_same(prompts: DatasetPrompts, name: str, accelerator: Accelerator) -> None:
    """Every rank takes its rows of the same prompts; of its own shard it would skip the others'."""
    ranks = accelerator.num_processes
    if ranks > 1 and len(set(gather_object([prompts.fingerprint()]))) > 1:
        raise DataError(
            f"{name} differs between the {ranks} processes, which each take their rows of every"
            " batch; pass the whole dataset, in the same order, to all of them"
        )


def check_prompts(
    prompts: Iterable[PromptSource], args: OnPolicyConfig, models: Mapping[str, nn.Module]
) -> None:
    """Check that prompts and responses fit the contexts, and prompts the policy's vocabulary."""
    known = vocabulary(models["the policy"])
    # An episode may be longer, if its environment begins new contexts; else it is truncated.
    turn = args.max_turn_tokens
    for source in prompts:
        if isinstance(source, DatasetPrompts):
            check_length(
                {**models, **vllm_limit(args)},
                prompt=source.report.longest,
                response=min(args.response_length, turn or args.response_length),
                option=args.length_option if turn is None else "max_turn_tokens",
            )
            if known is not None:
                source.check_tokens(known)
