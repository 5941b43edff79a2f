"""Builds prompt sources, batch sizes and evaluation sets from datasets; loads the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accelerate import Accelerator
from torch.nn import Module

from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.load import check_folder
from kedge.config.base import OnPolicyConfig
from kedge.config.resolve import DataOptions, RunSettings
from kedge.engine.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.errors import ConfigError, DataError
from kedge.trainers.run.evaluation import EvalSet


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptData:
    """Training prompts and the batch sizes derived from them."""

    source: DatasetPrompts
    plan: BatchSizes


def text_tokenizer(
    processing_class: Any, model: Any, *, trust: bool = False, revision: str | None = None
) -> Any:
    """The tokenizer: an object, a name or folder, part of a processor, or saved with the model.

    ``revision`` is the model's.

    Raises:
        ConfigError: it is missing or cannot be loaded.
    """
    if model is None or model == "" or not isinstance(model, str | Module):
        raise ConfigError(f"model={model!r} must be the policy: a model, a folder or a hub name")
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    name = processing_class if isinstance(processing_class, str) else name
    if isinstance(name, str) and name and isinstance(processing_class, str | None):
        return _load_tokenizer(name, trust, None if processing_class else revision)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(
            f"processing_class={processing_class!r} must be a tokenizer, for example"
            " AutoTokenizer.from_pretrained(...)"
        )
    return tokenizer


def own_or(processing_class: Any, tokenizer: Any) -> Any:
    """The given object (perhaps a processor), or the loaded tokenizer for None or a name."""
    return tokenizer if isinstance(processing_class, str | None) else processing_class


def _load_tokenizer(name: str, trust: bool, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    check_folder(name, "the tokenizer")
    try:
        kwargs = {} if revision is None else {"revision": revision}
        return AutoTokenizer.from_pretrained(
            name, padding_side="left", trust_remote_code=trust, **kwargs
        )
    except Exception as error:  # a damaged file raises any type
        raise ConfigError(f"cannot load the tokenizer from {name!r}: {error}") from error


def build_prompt_data(
    dataset: Any,
    tokenizer: Any,
    settings: RunSettings,
    accelerator: Accelerator,
    *,
    collator: Any = None,
    min_group: int = 1,
) -> PromptData:
    """Tokenize the training prompts and derive the batch sizes.

    Raises:
        DataError: the dataset is missing or invalid.
        ConfigError: sizes do not divide.
    """
    if dataset is None:
        raise DataError("train_dataset=None: pass a dataset with a `prompt` column")
    sizes = asdict(settings.batch)
    draft = compute_batch_sizes(**sizes | {"max_steps": 1}, min_group=min_group)
    source = build_prompt_source(
        dataset,
        tokenizer,
        settings.data,
        accelerator,
        prompts=draft.prompts,
        group=draft.group,
        shuffle=settings.data.shuffle,
        collator=collator,
    )
    return PromptData(
        source=source,
        plan=compute_batch_sizes(**sizes, dataset_rows=len(source), min_group=min_group),
    )


def build_prompt_source(
    dataset: Any,
    tokenizer: Any,
    options: DataOptions,
    accelerator: Accelerator,
    *,
    prompts: int,
    group: int = 1,
    shuffle: bool,
    collator: Any = None,
) -> DatasetPrompts:
    """The prompts of a dataset, this rank's shard."""
    return DatasetPrompts(
        dataset,
        tokenizer,
        prompts_per_step=prompts,
        num_generations=group,
        seed=options.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        shuffle=shuffle,
        max_prompt_length=options.max_prompt_length,
        overlong=options.overlong,
        chat_template_kwargs=options.chat_template,
        data_collator=collator,
        dataset_num_proc=options.num_proc,
    )


def build_eval_sets(
    dataset: Any,
    args: OnPolicyConfig,
    settings: RunSettings,
    tokenizer: Any,
    accelerator: Accelerator,
) -> list[EvalSet]:
    """Evaluation prompts: none, one dataset, or a dict of named ones.

    Raises:
        ConfigError: ``eval_strategy`` is set without evaluation prompts.
        DataError: a dataset is empty.
    """
    if dataset is None:
        strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        if strategy != "no":
            raise ConfigError(
                f"eval_strategy={strategy!r} needs an eval_dataset; pass one, or set"
                " eval_strategy='no'"
            )
        return []
    named = {"eval_": dataset}
    if isinstance(dataset, Mapping) and not {"prompt", "query", "input_ids"} & set(dataset):
        named = {f"eval_{name}_": rows for name, rows in dataset.items()}
    per_batch = args.per_device_eval_batch_size * accelerator.num_processes
    sets, completions = [], settings.evaluation.completions
    for prefix, rows in named.items():
        if hasattr(rows, "__len__") and not len(rows):
            raise DataError(f"eval_dataset{_name(prefix)} is empty; pass at least one prompt")
        source = build_prompt_source(
            rows,
            tokenizer,
            settings.data,
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


def _name(prefix: str) -> str:
    name = prefix.removeprefix("eval_").removesuffix("_")
    return f"[{name!r}]" if name else ""


def pad_id(tokenizer: Any) -> int:
    """The id that pads responses; masks never depend on it."""
    token_id = tokenizer.pad_token_id
    if token_id is None:
        token_id = tokenizer.eos_token_id
    return 0 if token_id is None else int(token_id)
