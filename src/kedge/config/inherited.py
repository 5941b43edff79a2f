"""How the fields of ``transformers.TrainingArguments`` act here."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from kedge.config.declare import (
    MOST,
    SECONDS,
    Accepts,
    Count,
    JSONFile,
    NoEffect,
    NonNegative,
    Text,
    Unsupported,
)

_Steps = Annotated[float, Interval(ge=0, le=MOST)]
_Share = Annotated[float, Interval(ge=0, lt=1)]
_COMPILE_MODES = Literal[
    "default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
# Types of fields that accept less than their annotation says, or more.
TYPES: dict[str, Any] = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), Count),
    **dict.fromkeys(("num_train_epochs", "warmup_steps", "eval_delay"), _Steps),
    **dict.fromkeys(("logging_steps", "save_steps"), _Steps),
    "eval_steps": _Steps | None,
    "max_steps": Annotated[int, Interval(ge=-1, le=MOST)],
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon"), NonNegative),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _Share),
    "warmup_ratio": _Share | None,  # early 5.x releases
    "max_grad_norm": Annotated[float, Interval(ge=0, le=math.inf), Accepts(None)],
    "torch_compile_mode": _COMPILE_MODES | None,
    "torch_empty_cache_steps": Count | None,
    "include_num_input_tokens_seen": Literal["all", "non_padding", "no"] | bool,
    "per_device_eval_batch_size": Count,
    "save_total_limit": Count | None,
    "seed": Annotated[int, Interval(ge=0, le=2**32 - 1)],
    "data_seed": Annotated[int, Interval(ge=0, le=2**62)] | None,
    "fsdp_config": dict[str, Any] | JSONFile | None,
    "deepspeed": dict[str, Any] | Text | None,
    "ddp_timeout": Annotated[int, Interval(ge=1, le=SECONDS)],
    "fsdp": bool | Literal[""] | str | list[str] | None,
    "resume_from_checkpoint": str | bool | None,
    "local_rank": Annotated[int, Ge(-1)],
}
# Section -> fields that act.
_ACTING = {
    "batch sizes and run length": """per_device_train_batch_size gradient_accumulation_steps
        num_train_epochs max_steps""",
    "learner": """lr_scheduler_type lr_scheduler_kwargs optim optim_args learning_rate weight_decay
        adam_epsilon adam_beta1 adam_beta2 warmup_steps warmup_ratio max_grad_norm bf16 fp16
        activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
        gradient_checkpointing_kwargs""",
    "prompts": "data_seed remove_unused_columns",
    "evaluation and logs": """logging_strategy logging_first_step logging_steps eval_strategy
        eval_on_start eval_steps eval_delay per_device_eval_batch_size disable_tqdm report_to
        run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
        include_num_input_tokens_seen skip_memory_metrics""",
    "checkpoints and hub": """output_dir save_strategy save_steps save_only_model save_total_limit
        load_best_model_at_end metric_for_best_model greater_is_better
        restore_callback_states_from_checkpoint resume_from_checkpoint push_to_hub hub_token
        hub_model_id hub_strategy hub_revision hub_private_repo""",
    "process": """full_determinism seed use_cpu ddp_backend tf32 fsdp_config deepspeed ddp_timeout
        fsdp accelerator_config log_on_each_node log_level log_level_replica local_rank
        torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps""",
    "command line and scripts": "do_train do_eval",
}
_LOADER = "prompts are tokenized once and kept in memory, without a data loader"
_NO_PREDICTIONS = (
    "evaluation samples responses and scores them with the reward; there are no predictions or"
    " labels to gather"
)
# Reason -> fields that are refused.
_REFUSED = {
    "only GaLore and APOLLO read it, and they are not supported": "optim_target_modules",
    "every loss is normalized over the tokens of all ranks": "average_tokens_across_devices",
    "there are no labels": "label_smoothing_factor",
    "noise in the embeddings would make the probability ratio meaningless": "neftune_noise_alpha",
    "prompts are not grouped by length": "length_column_name",
    _NO_PREDICTIONS: """prediction_loss_only eval_do_concat_batches eval_use_gather_object
        include_for_metrics batch_eval_metrics label_names""",
}
# Reason -> fields without effect.
_IGNORED = {
    "evaluation runs at the precision of training": "bf16_full_eval fp16_full_eval",
    "log-probabilities already come from a kernel that never materializes the logits": (
        "use_liger_kernel liger_kernel_config"
    ),
    "sampling always has a KV cache, and training passes need none": "use_cache",
    "non-finite values are logged as they are": "logging_nan_inf_filter",
    "evaluation gathers scores, not predictions": "eval_accumulation_steps",
    "rank 0 writes each checkpoint once; put output_dir on a file system that all nodes share": (
        "save_on_each_node"
    ),
    "training waits for every upload, so none is skipped": "hub_always_push",
    "the order of prompts depends only on seed and iteration, so resuming is exact": (
        "ignore_data_skip"
    ),
    _LOADER: """dataloader_drop_last dataloader_num_workers dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order""",
    "gradients are summed once per optimizer step, without DistributedDataParallel": """
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph""",
}
STATUS: dict[str, Any] = {
    **{name: section for section, names in _ACTING.items() for name in names.split()},
    **{name: Unsupported(why) for why, names in _REFUSED.items() for name in names.split()},
    **{name: NoEffect(why) for why, names in _IGNORED.items() for name in names.split()},
    "auto_find_batch_size": Unsupported(
        "the batch size cannot change during a run; `kedge plan ppo` estimates memory beforehand",
        way_out="lower per_device_train_batch_size and raise gradient_accumulation_steps",
    ),
    "enable_jit_checkpoint": Unsupported(
        "a killed run always leaves its last checkpoint complete",
        way_out="lower save_steps instead",
    ),
    "parallelism_config": Unsupported(
        "tensor and context parallel training are not supported",
        way_out="use FSDP2 or DeepSpeed ZeRO",
    ),
    "train_sampling_strategy": Unsupported(
        "shuffle_dataset sets the order of prompts", way_out="set shuffle_dataset"
    ),
    "debug": Unsupported("its hooks are for transformers.Trainer", also=([], None)),
    "do_predict": Unsupported("there is no prediction loop", way_out="set do_eval=True"),
    "dataloader_pin_memory": NoEffect(_LOADER, also=(False,)),
}
