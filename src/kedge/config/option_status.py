"""Where each field of PPOConfig acts, or why it is refused; source of the reference pages."""

from __future__ import annotations

import math
from typing import Any, Literal

from transformers.trainer_pt_utils import AcceleratorConfig

from kedge.config.compat.transformers4 import REMOVED
from kedge.config.options import Honored, Ignored, Moved, Refused, Support
from kedge.config.rollout import ROLLOUT_SUPPORT
from kedge.config.values import MOST, SECONDS, Range

_LOADER = Ignored("prompts are tokenized once and kept in memory, without a data loader")
_PREDICTIONS = Refused(
    "evaluation samples responses and scores them with the reward; there are no predictions or "
    "labels to gather",
    "leave it at its default",
)
_FULL_EVAL = Refused("evaluation runs at the precision of training", "set bf16=True or fp16=True")
_LIGER = Ignored("log-probabilities already come from a kernel that never materializes the logits")

_BATCH = "batch sizes and run length"
_LEARNER = "learner: optimizer and schedule"
_PRECISION = "learner: autocast; weights stay float32"
_CHECKPOINTING = "learner: activation checkpointing of the trained models"
_COMPILE = "learner: torch.compile of the forward pass"
_SCHEDULE = "schedule: when to log, evaluate and save; counted in iterations"
_CHECKPOINT = "checkpoints"
_HUB = "hub: upload of the model and its card"
_TRACKER = "trackers"
_DEVICE = "setup of device and processes (TrainingArguments)"
_DDP = Ignored("gradients are summed once per optimizer step, without DistributedDataParallel")
_BEST = "checkpoints: choice of the best, by an evaluation metric"
_SCRIPT = "command line and scripts"
_FILLED_IN = "batch sizes: filled in; a given value must equal the derived one"
_PPO = "algorithm: kedge.algorithms.ppo"
_SAMPLING = "sampling"
_KL = "KL controller"
_REWARD = "rewards"
_DATA = "prompts"
_VALUE = "value model"
_ENGINE = "engine"

_COMPILE_MODES = Literal[
    "default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
_COUNT = Range(ge=1)
_NOT_NEGATIVE = Range(ge=0)
_STEPS = Range(ge=0, le=MOST)
_BETA = Range(ge=0, lt=1)

INHERITED: dict[str, Support] = {
    "output_dir": Honored("checkpoints, completions, plots and logs are written there"),
    "per_device_train_batch_size": Honored(_BATCH, _COUNT),
    "gradient_accumulation_steps": Honored(_BATCH, _COUNT),
    "num_train_epochs": Honored(_BATCH, Range(ge=0, le=MOST)),
    "max_steps": Honored(_BATCH, Range(ge=-1, le=MOST)),
    "learning_rate": Honored(_LEARNER, _NOT_NEGATIVE),
    "lr_scheduler_type": Honored(_LEARNER),
    "lr_scheduler_kwargs": Honored(_LEARNER),
    "warmup_steps": Honored(_LEARNER, _STEPS),
    "optim": Honored(_LEARNER),
    "optim_args": Honored(_LEARNER),
    "weight_decay": Honored(_LEARNER, _NOT_NEGATIVE),
    "adam_beta1": Honored(_LEARNER, _BETA),
    "adam_beta2": Honored(_LEARNER, _BETA),
    "adam_epsilon": Honored(_LEARNER, _NOT_NEGATIVE),
    "max_grad_norm": Honored(
        "learner: gradient clipping; 0 turns it off, the norm is logged",
        Range(ge=0, le=math.inf),
        float | None,
    ),
    "optim_target_modules": Refused(
        "only GaLore and APOLLO read it, and they are not supported", "leave it unset"
    ),
    "average_tokens_across_devices": Refused(
        "every loss is normalized over the tokens of all ranks", "leave it True"
    ),
    "label_smoothing_factor": Refused("there are no labels", "leave it 0"),
    "bf16": Honored(_PRECISION),
    "fp16": Honored(_PRECISION),
    "bf16_full_eval": _FULL_EVAL,
    "fp16_full_eval": _FULL_EVAL,
    "tf32": Honored(_DEVICE),
    "activation_checkpointing": Honored(_CHECKPOINTING),
    "activation_checkpointing_kwargs": Honored(_CHECKPOINTING),
    "gradient_checkpointing": Honored(_CHECKPOINTING),
    "gradient_checkpointing_kwargs": Honored(_CHECKPOINTING),
    "torch_compile": Honored(_COMPILE),
    "torch_compile_backend": Honored(_COMPILE),
    "torch_compile_mode": Honored(
        _COMPILE,
        accepts=_COMPILE_MODES | None,
    ),
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "use_cache": Ignored("sampling always has a KV cache, and training passes need none"),
    "neftune_noise_alpha": Refused(
        "noise in the embeddings would make the probability ratio meaningless",
        "leave it unset",
    ),
    "torch_empty_cache_steps": Honored(
        "loop: iterations between releases of cached device memory", _COUNT
    ),
    "auto_find_batch_size": Refused(
        "the batch size cannot change during a run; `kedge plan ppo` estimates memory beforehand",
        "lower per_device_train_batch_size and raise gradient_accumulation_steps",
    ),
    "logging_strategy": Honored(_SCHEDULE),
    "logging_steps": Honored(_SCHEDULE, _STEPS),
    "logging_first_step": Honored(_SCHEDULE),
    "logging_nan_inf_filter": Ignored("non-finite values are logged as they are"),
    "log_on_each_node": Honored("process: which ranks use log_level"),
    "log_level": Honored("process: verbosity of the ranks that log"),
    "log_level_replica": Honored("process: verbosity of the other ranks"),
    "include_num_input_tokens_seen": Honored(
        "trackers: num_input_tokens_seen is logged",
        accepts=Literal["all", "non_padding", "no"] | bool,
    ),
    "disable_tqdm": Honored("progress bar"),
    "report_to": Honored(_TRACKER),
    "run_name": Honored(_TRACKER),
    "project": Honored(_TRACKER),
    "trackio_space_id": Honored(_TRACKER),
    "trackio_bucket_id": Honored(_TRACKER),
    "trackio_static_space_id": Honored(_TRACKER),
    "eval_strategy": Honored(_SCHEDULE),
    "eval_steps": Honored(_SCHEDULE, _STEPS),
    "eval_delay": Honored(_SCHEDULE, _STEPS),
    "eval_on_start": Honored(_SCHEDULE),
    "per_device_eval_batch_size": Honored("evaluation: prompts per rank at a time", _COUNT),
    "prediction_loss_only": _PREDICTIONS,
    "eval_do_concat_batches": _PREDICTIONS,
    "eval_use_gather_object": _PREDICTIONS,
    "eval_accumulation_steps": _PREDICTIONS,
    "include_for_metrics": _PREDICTIONS,
    "batch_eval_metrics": _PREDICTIONS,
    "label_names": _PREDICTIONS,
    "save_only_model": Honored("checkpoints: without optimizer state, cannot be resumed"),
    "save_strategy": Honored(_SCHEDULE),
    "save_steps": Honored(_SCHEDULE, _STEPS),
    "save_total_limit": Honored(_CHECKPOINT, _COUNT),
    "save_on_each_node": Refused(
        "rank 0 writes each checkpoint once", "put output_dir on a file system shared by all nodes"
    ),
    "enable_jit_checkpoint": Refused(
        "a killed run always leaves its last checkpoint complete", "lower save_steps instead"
    ),
    "push_to_hub": Honored(_HUB),
    "hub_token": Honored(_HUB),
    "hub_private_repo": Honored(_HUB + "; unset is private"),
    "hub_model_id": Honored(_HUB),
    "hub_strategy": Honored(_HUB),
    "hub_revision": Honored(_HUB),
    "hub_always_push": Ignored("training waits for every upload, so none is skipped"),
    "load_best_model_at_end": Honored(_BEST),
    "metric_for_best_model": Honored(_BEST),
    "greater_is_better": Honored(_BEST),
    "ignore_data_skip": Ignored(
        "the order of prompts depends only on seed and iteration, so resuming is exact"
    ),
    "restore_callback_states_from_checkpoint": Honored(_CHECKPOINT),
    "full_determinism": Honored("process: deterministic kernels"),
    "seed": Honored("every random number generator", Range(ge=0, le=2**32 - 1)),
    "data_seed": Honored("prompts: their order; the default is seed", Range(ge=0, le=2**62)),
    "use_cpu": Honored(_DEVICE),
    "accelerator_config": Honored(
        _DEVICE + "; its options for data loaders are refused",
        accepts=dict[str, Any] | str | AcceleratorConfig | None,
    ),
    "parallelism_config": Refused(
        "tensor and context parallel training are not supported", "use FSDP2 or DeepSpeed ZeRO"
    ),
    "dataloader_drop_last": _LOADER,
    "dataloader_num_workers": _LOADER,
    "dataloader_pin_memory": Ignored(_LOADER.reason, also=(False,)),
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    "remove_unused_columns": Honored(
        "prompts: True drops dataset columns that no reward function takes; False keeps all"
    ),
    "train_sampling_strategy": Refused(
        "shuffle_dataset sets the order of prompts", "set shuffle_dataset"
    ),
    "length_column_name": Refused("prompts are not grouped by length", "leave it unset"),
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": Honored(_DEVICE),
    "ddp_timeout": Honored(_DEVICE, Range(ge=1, le=SECONDS)),
    "fsdp": Honored(_DEVICE, accepts=bool | Literal[""] | str | list[str] | None),
    "fsdp_config": Honored(_DEVICE),
    "deepspeed": Honored(_DEVICE),
    "debug": Refused("its hooks are for transformers.Trainer", "leave it unset", also=([], None)),
    "skip_memory_metrics": Honored("trackers: False logs the peak memory of each iteration"),
    "do_train": Honored(_SCRIPT + ": do_eval without do_train only evaluates"),
    "do_eval": Honored(_SCRIPT + ": evaluate at the end"),
    "do_predict": Refused("there is no prediction loop", "set do_eval=True"),
    "resume_from_checkpoint": Honored(
        "train(): default of its argument", accepts=str | bool | None
    ),
    "local_rank": Honored(
        "accepted from launchers; their environment variables decide", Range(ge=-1)
    ),
}

OWN: dict[str, Support] = {
    "exp_name": Honored("trackers: the run's name when run_name is unset"),
    "dataset_num_proc": Honored("prompts: processes that tokenize"),
    "num_mini_batches": Honored(_BATCH),
    "total_episodes": Honored(_BATCH),
    "num_ppo_epochs": Honored(_BATCH),
    "num_generations": Honored(_BATCH),
    "local_rollout_forward_batch_size": Honored(
        "rows at a time when sampling, scoring and computing log-probabilities"
    ),
    "num_sample_generations": Honored("schedule: tables of sample completions over the run"),
    "log_completions_hub_repo": Honored("trackers: a dataset repository of completions"),
    "log_token_rows": Honored("trackers: responses token by token, for kedge report"),
    "sft_model_path": Honored(_SCRIPT),
    "reward_model_path": Honored(_SCRIPT),
    "model_adapter_name": Honored("models: the trained adapter"),
    "ref_adapter_name": Honored("models: the adapter used as reference"),
    "ds3_gather_for_generation": Refused(
        "responses are always sampled with full weights", "leave it True"
    ),
    **dict.fromkeys(
        (
            "world_size",
            "num_total_batches",
            "micro_batch_size",
            "local_batch_size",
            "batch_size",
            "local_mini_batch_size",
            "mini_batch_size",
        ),
        Honored(_FILLED_IN),
    ),
    **dict.fromkeys(
        (
            "response_length",
            "min_new_tokens",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "stop_token",
            "stop_token_id",
            "stop_token_ids",
            "stop_strings",
            "keep_sampling_mask",
        ),
        Honored(_SAMPLING),
    ),
    **dict.fromkeys(
        (
            "whiten_rewards",
            "whiten_advantages",
            "kl_estimator",
            "cliprange",
            "vf_coef",
            "cliprange_value",
            "gamma",
            "lam",
            "score_position",
            "bootstrap_truncated",
            "lam_value",
            "lam_alpha",
            "dual_clip",
        ),
        Honored(_PPO),
    ),
    **dict.fromkeys(("kl_coef", "adaptive_kl", "kl_target", "kl_horizon"), Honored(_KL)),
    **dict.fromkeys(
        (
            "missing_eos_penalty",
            "non_eos_penalty",
            "penalty_reward_value",
            "reward_weights",
            "on_reward_error",
            "reward_error_score",
        ),
        Honored(_REWARD),
    ),
    "non_stop_penalty": Moved("non_eos_penalty"),
    **dict.fromkeys(
        ("max_prompt_length", "chat_template_kwargs", "overlong_prompts", "shuffle_dataset"),
        Honored(_DATA),
    ),
    **dict.fromkeys(("value_source", "value_learning_rate", "value_warmup_steps"), Honored(_VALUE)),
    "allow_low_precision_weights": Honored("models: trainable bf16 and fp16 weights"),
    "num_generations_eval": Honored("evaluation: completions of each prompt"),
    "eval_success_score": Honored("evaluation: accuracy and pass@k"),
    "eval_against_start": Honored("evaluation: win rate against the initial policy"),
    "save_rollouts": Honored(_ENGINE),
    "replay_rollouts": Honored(_ENGINE),
    "preflight": Honored(_ENGINE),
    "max_lag": Honored(_ENGINE),
    "rollout_schedule": Honored(_ENGINE),
    "num_partial_batches": Honored(_ENGINE),
    **dict.fromkeys(
        (
            "sampler_correction",
            "sampler_correction_level",
            "sampler_correction_low",
            "sampler_correction_high",
        ),
        Honored(_ENGINE),
    ),
    # PPOv2Config
    "sanity_check": Honored(_SCRIPT + ": only the first 100 rows of the dataset"),
    "base_model": Honored(_SCRIPT + ": folder or Hub name of the tokenizer"),
}

FIELD_SUPPORT: dict[str, Support] = {**INHERITED, **REMOVED, **ROLLOUT_SUPPORT, **OWN}
