"""From datasets to prompts, and the sizes that follow from them."""

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
    """Training prompts and the sizes that follow from them."""

    source: DatasetPrompts
    plan: BatchSizes


def text_tokenizer(
    processing_class: Any, model: Any, *, trust: bool = False, revision: str | None = None
) -> Any:
    """The tokenizer: given, by its name or folder, inside a processor, or beside the model's files.

    ``revision`` is the model's.

    Raises:
        ConfigError: there is none.
    """
    if model is None or model == "" or not isinstance(model, str | Module):
        raise ConfigError(
            f"model={model!r} is neither a model nor the folder or name of one: it is the policy"
        )
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    name = processing_class if isinstance(processing_class, str) else name
    if isinstance(name, str) and name and isinstance(processing_class, str | None):
        return _load_tokenizer(name, trust, None if processing_class else revision)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(
            f"processing_class={processing_class!r} is no tokenizer; pass"
            " AutoTokenizer.from_pretrained(...), which turns prompts into tokens and back"
        )
    return tokenizer


def own_or(processing_class: Any, tokenizer: Any) -> Any:
    """What the user gave, a processor perhaps, unless it was nothing or a name."""
    return tokenizer if isinstance(processing_class, str | None) else processing_class


def _load_tokenizer(name: str, trust: bool, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    check_folder(name, "the tokenizer")
    try:
        more = {} if revision is None else {"revision": revision}
        return AutoTokenizer.from_pretrained(
            name, padding_side="left", trust_remote_code=trust, **more
        )
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ConfigError(f"the tokenizer in {name!r} cannot be loaded: {error}") from error


def build_prompt_data(
    dataset: Any,
    tokenizer: Any,
    settings: RunSettings,
    accelerator: Accelerator,
    *,
    collator: Any = None,
    min_group: int = 1,
) -> PromptData:
    """Tokenize the training prompts and derive every size.

    Raises:
        DataError: no dataset, or one that cannot be used.
        ConfigError: sizes that do not divide.
    """
    if dataset is None:
        raise DataError("train_dataset=None: give prompts, a dataset with a `prompt` column")
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
    """Prompts of a dataset, this process's share."""
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
        ConfigError: evaluations are asked for, and there are no prompts.
    """
    if dataset is None:
        asked = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        if asked != "no":
            raise ConfigError(
                f"eval_strategy={asked!r} asks for evaluations, and there is no eval_dataset: give"
                " one, or set eval_strategy='no'"
            )
        return []
    named = {"eval_": dataset}
    if isinstance(dataset, Mapping) and not {"prompt", "query", "input_ids"} & set(dataset):
        named = {f"eval_{name}_": each for name, each in dataset.items()}
    per_batch = args.per_device_eval_batch_size * accelerator.num_processes
    made, completions = [], settings.evaluation.completions
    for prefix, each in named.items():
        if hasattr(each, "__len__") and not len(each):
            raise DataError(
                f"eval_dataset{_of(prefix)} is empty: there is no prompt to evaluate on"
            )
        source = build_prompt_source(
            each,
            tokenizer,
            settings.data,
            accelerator,
            prompts=per_batch,
            group=completions,
            shuffle=False,
        )
        batches, rows = math.ceil(len(source) / per_batch), len(source) * completions
        made.append(EvalSet(prefix=prefix, source=source, batches=batches, rows=rows))
    return made


def _of(prefix: str) -> str:
    name = prefix.removeprefix("eval_").removesuffix("_")
    return f"[{name!r}]" if name else ""


def pad_id(tokenizer: Any) -> int:
    """What fills the slots after a response; masks never depend on it."""
    given = tokenizer.pad_token_id
    if given is None:
        given = tokenizer.eos_token_id
    return 0 if given is None else int(given)
