"""Supervised fine-tuning with TRL, also on chats whose template does not mark the assistant."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.errors import DataError
from kedge.models.load import eos_token_ids
from kedge.ops.cpu.patch import Kernels

logger = logging.getLogger(__name__)


def train_supervised(
    model: Any, tokenizer: Any, config: Any, train: Any, test: Any = None, *, peft: Any = None
) -> Any:
    """Train on texts, prompts with completions, or chats, and save.

    Every completion ends with the tokenizer's end-of-text token, so that the model learns to stop;
    with prompts, the loss covers completions only.  With ``assistant_only_loss`` it covers what the
    assistant writes in a chat, whether or not the chat template marks it.

    Args:
        model: a causal language model.
        tokenizer: tokenizer of the model; must have an end-of-text token.
        config: ``trl.SFTConfig``.
        train: rows with ``text``, ``prompt`` and ``completion``, or ``messages``.
        test: rows to evaluate on.
        peft: a PEFT configuration.

    Returns:
        The trainer.

    Raises:
        DataError: none of these columns, a tokenizer without an end-of-text token, or a chat
            template in which the assistant's messages cannot be found.
    """
    from trl.trainer.sft_trainer import SFTTrainer

    columns = set(train.column_names)
    accepted = ({"text"}, {"prompt", "completion"}, {"messages"})
    if not any(names <= columns for names in accepted):
        raise DataError(
            f"supervised training needs a column text, columns prompt and completion, or messages;"
            f" the dataset has {', '.join(sorted(columns))}"
        )
    if tokenizer.eos_token is None:
        raise DataError(
            "the tokenizer must have an end-of-text token to end completions; set eos_token"
        )
    ends = eos_token_ids(model, tokenizer)
    train, test, config = tokenize_chats(train, test, tokenizer, config, ends=ends)
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=peft,
    )
    train_with_kernels(trainer)
    trainer.save_model(config.output_dir)
    tokenizer.save_pretrained(config.output_dir)
    return trainer


def train_with_kernels(trainer: Any) -> None:
    """Call ``trainer.train`` with Kedge's faster kernels, if the model runs unwrapped.

    Args:
        trainer: a ``transformers.Trainer``; resumes from ``args.resume_from_checkpoint``.
    """
    args = trainer.args
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    wrapped = args.torch_compile or sharded or args.n_gpu > 1
    kernels = Kernels([] if wrapped else [trainer.model])
    trainer.add_callback(_WeightsChanged(kernels))
    with kernels.active():
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


class _WeightsChanged(TrainerCallback):
    """Expires the kernels' copies of weights; a fused optimizer leaves no trace of its step."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._kernels.weights_changed()


# -- chats -----------------------------------------------------------------------------------------


def tokenize_chats(
    train: Any, test: Any, tokenizer: Any, config: Any, *, ends: Sequence[int]
) -> tuple[Any, Any, Any]:
    """Tokenize and label chats; returns training rows, evaluation rows and configuration.

    For ``assistant_only_loss`` and a template without generation marks.  The tokens of an assistant
    message are what the template adds to the conversation before it with a generation prompt, up to
    the last end token: what the policy samples in a turn.  All three are returned as they are where
    nothing is to be done, or TRL knows a marked form of the template.

    Args:
        train: a ``datasets.Dataset``.
        test: evaluation rows, or None.
        tokenizer: a tokenizer with a chat template.
        config: ``trl.SFTConfig``.
        ends: tokens that end a response.

    Raises:
        DataError: the tokenizer has no chat template, or its template renders messages differently
            once others follow.
    """
    path = Path(config.chat_template_path or "")
    if path.suffix in (".jinja", ".j2") and path.is_file():
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    elif config.chat_template_path:
        return train, test, config  # other models' templates: TRL adds their tokens
    columns = set(train.column_names)
    if "messages" not in columns or columns & {"input_ids", "image", "images"}:
        return train, test, config
    roles = {message["role"] for message in train[0]["messages"]} if len(train) else set()
    if not config.assistant_only_loss:
        if "tool" in roles:
            logger.warning(
                "assistant_only_loss is False: the loss covers the results of tools and the user's"
                " messages; set it to True to train on what the assistant writes"
            )
        return train, test, config
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, which messages need;"
            " pass --chat_template_path FILE.jinja"
        )
    if _has_marks(tokenizer):
        return train, test, config
    marked = [rows and _label_chats(rows, tokenizer, config, ends) for rows in (train, test)]
    config = copy.copy(config)
    config.assistant_only_loss = False  # the dataset has its labels
    return marked[0], marked[1], config


def _label_chats(rows: Any, tokenizer: Any, config: Any, ends: Sequence[int]) -> Any:
    labeled = rows.map(
        _label_assistant,
        fn_kwargs={"tokenizer": tokenizer, "ends": frozenset(ends)},
        num_proc=config.dataset_num_proc,
        remove_columns=rows.column_names,
        desc="Tokenizing",
    )
    if not set(ends) & {*labeled[0]["labels"]}:
        logger.warning(
            "the chat template of %s ends no assistant message with an end token (%s): the model"
            " may not learn to stop",
            tokenizer.name_or_path,
            ", ".join(tokenizer.convert_ids_to_tokens(list(ends))),
        )
    return labeled


def _has_marks(tokenizer: Any) -> bool:
    """Whether the template, or TRL's version of it, marks the assistant's text."""
    from trl.chat_template_utils import get_training_chat_template

    template = tokenizer.chat_template
    text = template.get("default", "") if isinstance(template, Mapping) else template
    if re.search(r"\{%-?\s*generation\s*-?%\}", text):
        return True
    try:
        get_training_chat_template(tokenizer)
    except Exception:  # templates may raise anything, TRL a ValueError
        return False
    return True


def _label_assistant(
    row: Mapping[str, Any], tokenizer: Any, ends: frozenset[int]
) -> dict[str, list[int]]:
    """Token ids of a conversation, and labels that are -100 outside assistant messages."""
    messages: Any = _without_none(row["messages"])
    tools = row.get("tools")
    options = {"tools": json.loads(tools) if isinstance(tools, str) else tools, "tokenize": False}
    options |= row.get("chat_template_kwargs") or {}
    text = tokenizer.apply_chat_template(messages, **options)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, labels = encoded["input_ids"], [-100] * len(encoded["input_ids"])
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            head = tokenizer.apply_chat_template(
                messages[:i], add_generation_prompt=True, **options
            )
            tail = tokenizer.apply_chat_template(messages[: i + 1], **options)
            cause = "renders it differently once other messages follow"
            preserved = text.startswith(head) and text.startswith(tail) and len(tail) > len(head)
        except Exception as error:  # templates may raise anything
            preserved, cause = False, f"cannot render the messages before it alone: {error}"
        if not preserved:
            raise DataError(
                f"assistant_only_loss: the chat template of {tokenizer.name_or_path} has no"
                f" {{% generation %}} marks, and message {i} of a conversation cannot be found"
                f" without them, since the template {cause}. Put what assistant messages say, with"
                " their end, between {% generation %} and {% endgeneration %} in a copy of the"
                " template and pass --chat_template_path FILE.jinja, or set --assistant_only_loss"
                " False to train on all messages"
            )
        inside = [
            t
            for t, (begin, end) in enumerate(encoded["offset_mapping"])
            if len(head) <= begin < end <= len(tail)
        ]
        last = max((t for t in inside if ids[t] in ends), default=len(ids))
        for t in inside:
            if t <= last:
                labels[t] = ids[t]
    return {"input_ids": ids, "labels": labels}


def _without_none(value: Any) -> Any:
    """Drop keys that only other rows of the table have."""
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return value
