"""Builds prompt sources, batch sizes and evaluation sets from datasets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from kedge.backends.data import DatasetPrompts
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout import json_object
from kedge.engine.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.errors import ConfigError, DataError
from kedge.protocols import PromptSource
from kedge.trainers.spec import shared_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One set of evaluation prompts."""

    prefix: str  # "eval_" or "eval_<name>_"
    source: PromptSource
    batches: int
    rows: int  # responses in total


def build_prompts(
    dataset: Any,
    args: OnPolicyConfig,
    tokenizer: Any,
    accelerator: Accelerator,
    *,
    collator: Any = None,
    min_group: int = 1,
) -> tuple[DatasetPrompts, BatchSizes]:
    """Tokenize the training prompts and derive the batch sizes."""
    if dataset is None:
        raise DataError("train_dataset=None: pass a dataset with a `prompt` column")
    options = shared_kwargs(args, compute_batch_sizes) | {
        "world_size": accelerator.num_processes,
        "min_group": min_group,
    }
    draft = compute_batch_sizes(**options | {"max_steps": 1})
    prompts = build_prompt_source(
        dataset,
        args,
        tokenizer,
        accelerator,
        prompts=draft.prompts,
        group=draft.group,
        shuffle=args.shuffle_dataset,
        collator=collator,
    )
    return prompts, compute_batch_sizes(**options, dataset_rows=len(prompts))


def build_prompt_source(
    dataset: Any,
    args: OnPolicyConfig,
    tokenizer: Any,
    accelerator: Accelerator,
    *,
    prompts: int,
    group: int,
    shuffle: bool,
    collator: Any = None,
) -> DatasetPrompts:
    """The prompts of a dataset, this rank's shard."""
    return DatasetPrompts(
        dataset,
        tokenizer,
        prompts_per_step=prompts,
        num_generations=group,
        seed=args.seed if args.data_seed is None else args.data_seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        shuffle=shuffle,
        max_prompt_length=args.max_prompt_length,
        overlong=args.overlong_prompts,
        chat_template_kwargs=json_object("chat_template_kwargs", args.chat_template_kwargs),
        data_collator=collator,
        dataset_num_proc=args.dataset_num_proc,
    )


def build_eval_sets(
    dataset: Any, args: OnPolicyConfig, tokenizer: Any, accelerator: Accelerator
) -> list[EvalSet]:
    """Evaluation prompts: none, one dataset, or a dict of named ones."""
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
        source = build_prompt_source(
            rows,
            args,
            tokenizer,
            accelerator,
            prompts=per_batch,
            group=completions,
            shuffle=False,
        )
        sets.append(
            EvalSet(
                prefix=prefix,
                source=source,
                batches=math.ceil(len(source) / per_batch),
                rows=len(source) * completions,
            )
        )
    return sets
