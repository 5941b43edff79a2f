"""Supervised fine-tuning with TRL."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.errors import DataError
from kedge.models.end_tokens import eos_token_ids
from kedge.ops.cpu.patch import Kernels
from kedge.pretrain.chats import tokenize_chats


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
    """Call ``trainer.train`` with Kedge's faster kernels where the model runs as it is.

    Args:
        trainer: a ``transformers.Trainer``; resumes as ``args.resume_from_checkpoint`` says.
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
