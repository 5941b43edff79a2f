"""``kedge.PPOTrainer`` in a class that derives from ``transformers.Trainer``, for ms-swift."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import kedge
from kedge.config.declare import default_of, status
from kedge.ext.trl import options
from kedge.ext.trl.compat.trl_trainers import PolicyAndValue

logger = logging.getLogger(__name__)


_PPO = (  # fields of TRL's PPOConfig
    *("reward_model_path", "sft_model_path", "model_adapter_name", "ref_adapter_name"),
    *("num_ppo_epochs", "num_mini_batches", "whiten_rewards", "kl_coef", "kl_estimator"),
    *("cliprange", "cliprange_value", "vf_coef", "gamma", "lam", "total_episodes", "temperature"),
    *("local_rollout_forward_batch_size", "num_sample_generations", "response_length"),
    *("stop_token", "stop_token_id", "missing_eos_penalty", "dataset_num_proc"),
)
# Set by ms-swift for its own training loop and its removal of dataset columns.
_OF_SWIFT = ("accelerator_config", "remove_unused_columns", "dataloader_")
_TRL_FIELDS = [f for f in fields(options.PPOConfig) if f.name in _PPO]
PPOConfig = make_dataclass(
    "PPOConfig",
    [
        *((f.name, Any, field(default=default_of(f))) for f in _TRL_FIELDS),
        ("world_size", Any, field(default=1)),  # set by ms-swift
    ],
    bases=(TrainingArguments,),
)
PPOConfig.__doc__ = (
    "The options of TRL's ``PPOConfig``, which ``kedge.trl.PPOConfig`` checks later."
)


def to_kedge_config(args: Any) -> kedge.PPOConfig:
    """Convert to a ``kedge.trl.PPOConfig``; one warning lists options that Kedge does not read."""
    plain = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    names = {f.name for f in fields(TrainingArguments) if f.init} - {"output_dir"}
    changed = {name for name in names if getattr(args, name) != getattr(plain, name)}
    changed = {name for name in changed if not name.startswith(_OF_SWIFT)}
    acting = {name for name in changed if isinstance(status(kedge.PPOConfig, name), str)}
    if unread := sorted(changed - acting):
        logger.warning("Kedge does not read these options: %s", ", ".join(unread))
    read = [*_PPO, "output_dir", *acting]
    return options.PPOConfig(**{name: getattr(args, name) for name in read})


class PPOTrainer(Trainer):
    """A ``transformers.Trainer`` whose ``train`` is that of ``kedge.PPOTrainer``.

    Its attributes and ``save_model`` are those of ``transformers.Trainer``, so that a subclass may
    rely on them; checkpoints, logs and evaluation are Kedge's.  The arguments are those of
    ``kedge.PPOTrainer``; ``args`` may be a ``PPOConfig`` of this module, and ``data_collator``
    makes ``input_ids`` and ``attention_mask``, which rows contain without it.
    """

    def __init__(
        self,
        args: Any = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        eval_dataset: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
    ) -> None:
        if not hasattr(self, "accelerator"):  # a subclass may have called Trainer.__init__
            super().__init__(model=model, args=args, processing_class=processing_class)
        self.kedge_trainer = kedge.PPOTrainer(
            args=args if isinstance(args, kedge.PPOConfig) else to_kedge_config(args),
            processing_class=processing_class,
            model=model,
            ref_model=ref_model,
            reward_model=without_peft(reward_model),
            value_model=without_peft(value_model),
            train_dataset=prompts(train_dataset, data_collator),
            eval_dataset=prompts(eval_dataset, data_collator),
            callbacks=callbacks,
            peft_config=peft_config,
        )
        self.state = self.kedge_trainer.state
        self.model = PolicyAndValue(self.kedge_trainer.model, value_model)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or resume from a checkpoint that Kedge wrote."""
        try:
            return self.kedge_trainer.train(resume_from_checkpoint=resume_from_checkpoint)
        finally:
            state: Any = self.kedge_trainer.state
            self.state = state
            state.last_model_checkpoint = get_last_checkpoint(self.args.output_dir)

    def generate_completions(self, sampling: bool = False) -> None:
        """Log a table of sampled responses."""
        self.kedge_trainer.generate_completions(sampling=sampling)


def without_peft(model: Any) -> Any:
    """The model below a PEFT wrapper, with the adapter's layers in place."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def prompts(rows: Any, collator: Any) -> Any:
    """A table of ``input_ids`` without padding; None for None or an empty dataset."""
    if rows is None or (hasattr(rows, "__len__") and not len(rows)):
        return None
    ids = []
    for i in range(len(rows)):
        row = rows[i] if collator is None else collator([rows[i]])
        tokens, mask = torch.as_tensor(row["input_ids"]).reshape(-1), row.get("attention_mask")
        kept = tokens if mask is None else tokens[torch.as_tensor(mask).reshape(-1).bool()]
        ids.append(kept.tolist())
    return Dataset.from_dict({"input_ids": ids})
