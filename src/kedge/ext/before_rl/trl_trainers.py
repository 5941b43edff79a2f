"""Supervised fine-tuning and reward models with TRL's trainers (extra ``sft``)."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.chat_template import template_options
from kedge.data.rows import exact_dataset
from kedge.models.load import eos_token_ids
from kedge.models.score_head import SHIFT, save_adapter_shift
from kedge.ops.kernels import Kernels
from kedge.records.errors import ConfigError, DataError
from kedge.rewards.model import RewardModel

logger = logging.getLogger(__name__)
KIND = "kind"  # column of the kind of a pair
FILE = "held_out.json"
FEWEST = 20  # pairs needed to judge a kind
OFTEN = 0.1  # share of unfinished answers that beat the finished one


def train_supervised(
    model: Any, tokenizer: Any, config: Any, train: Any, test: Any = None, *, peft: Any = None
) -> Any:
    """Train on texts, prompts with completions, or chats, and save.

    Every completion ends with the tokenizer's end-of-text token, so that the model learns to stop;
    with prompts, the loss covers completions only.  With ``assistant_only_loss`` it covers what the
    assistant writes in a chat, whether or not the chat template marks it.  Rows have ``text``,
    ``prompt`` and ``completion``, or ``messages``; ``config`` is a ``trl.SFTConfig``.
    """
    from trl.trainer.sft_trainer import SFTTrainer

    columns = set(train.column_names)
    accepted = ({"text"}, {"prompt", "completion"}, {"messages"})
    if not any(names <= columns for names in accepted):
        raise DataError(
            f"supervised training needs a column text, columns prompt and completion, or messages;"
            f" the dataset has {', '.join(sorted(columns))}; --prompt_column and"
            " --completion_column name columns that are called otherwise"
        )
    if tokenizer.eos_token is None:
        raise DataError(
            "the tokenizer must have an end-of-text token to end completions; set eos_token"
        )
    ends = eos_token_ids(model, tokenizer)
    train, test = exact_dataset(train), test and exact_dataset(test)
    train, test, config = tokenize_chats(train, test, tokenizer, config, ends=ends)
    rows = {"train_dataset": train, "eval_dataset": test, "processing_class": tokenizer}
    trainer = SFTTrainer(model=model, args=config, peft_config=peft, **rows)
    train_with_kernels(trainer)
    trainer.save_model(config.output_dir)
    tokenizer.save_pretrained(config.output_dir)
    return trainer


def train_with_kernels(trainer: Any) -> None:
    """Call ``trainer.train``, perhaps resumed, with faster kernels if the model runs unwrapped."""
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
    the last token of ``ends``: what the policy samples in a turn.  All three are returned as they
    are where nothing is to be done, or TRL knows a marked form of the template.
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
    messages: Any = row["messages"]
    options = {"tokenize": False, **template_options(row)}
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


# -- reward models ---------------------------------------------------------------------------------
#
# Huang et al. 2024 (arXiv:2403.17031), details on reward models; Stiennon et al. 2020
# (arXiv:2009.01325), appendix B.1.  The trained model is checked on held-out pairs by kind of
# mistake, since accuracy over all pairs hides a kind that it does not see, and on answers without
# an end: preferences hold finished answers alone, so their score is an extrapolation, often up.


def init_head(model: nn.Module, *, seed: int = 0) -> None:
    """Reinitialize the score head: standard deviation 1 / sqrt(hidden + 1), bias 0."""
    layers = (getattr(model, name, None) for name in ("score", "classifier"))
    heads = (getattr(layer, "out_proj", layer) for layer in layers)
    head = next((head for head in heads if isinstance(head, nn.Linear)), None)
    if head is None:
        raise ConfigError(
            f"{type(model).__name__} has no score or classifier layer; use --no_fresh_head"
        )
    generator = torch.Generator().manual_seed(seed)
    deviation = 1 / math.sqrt(head.weight.shape[1] + 1)
    with torch.no_grad():
        weight = torch.randn(head.weight.shape, generator=generator) * deviation
        head.weight.copy_(weight.to(head.weight))
        if head.bias is not None:
            head.bias.zero_()


def train_reward(
    model: Any,
    tokenizer: Any,
    config: Any,
    train: Any,
    test: Any = None,
    *,
    references: Any = None,
    fresh_head: bool = True,
    peft: Any = None,
) -> Any:
    """Train on preferences, shift the score so that ``references`` have 0 on average, and save.

    Rows have ``chosen`` and ``rejected``, and ``prompt`` if these do not include it; ``config`` is
    a ``trl.RewardConfig``.  The trained model is checked on the rows of ``test``, also by kind of
    mistake; the result is printed and written next to it.
    """
    from trl.trainer.reward_trainer import RewardTrainer

    missing = {"chosen", "rejected"} - set(train.column_names)
    if missing:
        raise DataError(
            "preferences need columns chosen and rejected, and prompt unless these include it;"
            f" {', '.join(sorted(missing))} is missing (the dataset has"
            f" {', '.join(train.column_names)}); --winner_column, --a_column and --b_column read"
            " two answers and the better one"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if fresh_head:
        init_head(model, seed=config.seed)
    train, test = exact_dataset(train), test and exact_dataset(test)
    rows = {"train_dataset": train, "eval_dataset": test, "processing_class": tokenizer}
    trainer = RewardTrainer(model=model, args=config, peft_config=peft, **rows)
    _score_last_tokens(trainer)
    train_with_kernels(trainer)
    if references is not None:
        shift_scores(trainer.model, tokenizer, references)
    trainer.save_model(config.output_dir)
    if test is not None:
        check = check_reward_model(trainer.model, trainer.eval_dataset)
        if trainer.is_world_process_zero():
            sys.stdout.write("".join(f"kedge: {line}\n" for line in describe(check)))
            sys.stdout.flush()
            text = json.dumps(check, indent=1) + "\n"
            Path(config.output_dir, FILE).write_text(text, encoding="utf-8")
    trained: Any = trainer.model
    if hasattr(trained, "peft_config"):
        save_adapter_shift(config.output_dir, getattr(trained.config, SHIFT, 0.0))
    tokenizer.save_pretrained(config.output_dir)
    return trainer


def _score_last_tokens(trainer: Any) -> None:
    """Score the last token of each row even if it is the padding token, such as EOS.

    transformers scores the last token that is not padding.  For such a batch the padding, in the
    rows and in the configuration, is another token while the loss is computed.
    """
    compute_loss = trainer.compute_loss

    def with_other_padding(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        config = trainer.model.config.get_text_config()
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        ends = set(ids[torch.arange(len(ids)), mask.sum(1) - 1].tolist())
        pad = config.pad_token_id
        if pad not in ends:
            return compute_loss(model, inputs, *args, **options)
        config.pad_token_id = next(token for token in count() if token not in ends)
        ids = ids.masked_fill(mask == 0, config.pad_token_id)
        try:
            return compute_loss(model, {**inputs, "input_ids": ids}, *args, **options)
        finally:
            config.pad_token_id = pad

    trainer.compute_loss = with_other_padding


def shift_scores(model: Any, tokenizer: Any, references: Sequence[str]) -> float:
    """Shift scores so that texts score 0 on average; returns the shift, which replaces an earlier.

    It is saved in the configuration, and added wherever Kedge loads the model (``kedge.rewards``).
    """
    if not len(references):
        raise DataError("references must hold at least one text to shift scores by")
    was_training = model.training
    setattr(model.config, SHIFT, 0.0)
    scores = RewardModel(model).score_texts(list(references), tokenizer)
    model.train(was_training)
    shift = -float(scores.double().mean())
    setattr(model.config, SHIFT, shift)
    return shift


def check_reward_model(model: Any, rows: Any) -> dict[str, Any]:
    """Accuracy over tokenized pairs and by their ``kind``, and scores of unfinished answers."""
    chosen, rejected = list(rows["chosen_ids"]), list(rows["rejected_ids"])
    unfinished = [_cut(a, b) for a, b in zip(chosen, rejected, strict=True)]
    source = RewardModel(model)
    better, worse, cut = (source.score_ids(ids) for ids in (chosen, rejected, unfinished))
    right = (better > worse).tolist()
    groups: dict[str, list[bool]] = {}
    for kind, one in zip(rows[KIND] if KIND in rows.column_names else [], right, strict=False):
        groups.setdefault(str(kind), []).append(one)
    kinds = {kind: _accuracy(groups[kind]) for kind in sorted(groups)}
    return {
        **_accuracy(right),
        "kinds": kinds,
        "blind": [k for k, a in kinds.items() if a["pairs"] >= FEWEST and a["low"] <= 0.5],
        "lowest_score": float(torch.cat([better, worse]).quantile(0.01)),
        "unfinished_higher": float((cut > better).float().mean()),
        "unfinished_score": float(cut.mean()),
        "finished_score": float(better.mean()),
    }


def _cut(answer: Sequence[int], other: Sequence[int]) -> list[int]:
    """The first half of the part that differs from the other answer, without the end."""
    same = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), 0)
    return list(answer[: max(1, min(same + (len(answer) - same + 1) // 2, len(answer) - 1))])


def _accuracy(right: list[bool]) -> dict[str, float]:
    """Share of correctly ordered pairs, and the lower end of its 95% interval (Wilson)."""
    n, z = len(right), 1.96
    share = sum(right) / n
    spread = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return {
        "pairs": n,
        "accuracy": share,
        "low": (share + z * z / (2 * n) - spread) / (1 + z * z / n),
    }


def describe(check: dict[str, Any]) -> list[str]:
    """Format the check as lines of text, with advice."""
    share, lowest = check["unfinished_higher"], math.floor(check["lowest_score"])
    lines = [f"on {check['pairs']} held-out pairs, {check['accuracy']:.1%} are in the right order"]
    for kind, one in check["kinds"].items():
        mark = "  not better than chance" if kind in check["blind"] else ""
        lines.append(f"  {kind:<20} {one['pairs']:>5} pairs  {one['accuracy']:>6.1%}{mark}")
    if check["blind"]:
        lines.append(
            f"the reward model does not see {', '.join(check['blind'])}, so RL will not avoid it:"
            " train on more such pairs, or longer"
        )
    lines.append(
        f"{share:.0%} of the answers score higher when they are cut short"
        f" (mean {check['unfinished_score']:.2f}, whole {check['finished_score']:.2f})"
    )
    if share > OFTEN:
        lines.append(
            "RL would learn not to end: replace the score of unfinished responses, with"
            f" --non_eos_penalty --penalty_reward_value {lowest}"
        )
    return lines
