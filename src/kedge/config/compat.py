"""How the fields of ``transformers.TrainingArguments`` act here, and names of TRL's releases."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from annotated_types import Interval
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from kedge.config.declare import (
    MOST,
    SECONDS,
    ActsIn,
    Alias,
    Foreign,
    Inherited,
    JSONFile,
    NoEffect,
    Text,
    Unsupported,
    default_of,
    format_value,
    no_effect,
    option,
    read_mapping,
    unsupported,
)
from kedge.config.rollout_engines import engine_args
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)
_BATCH = "batch sizes and run length"
_LEARNER = "learner: optimizer and schedule"
_CHECKPOINTING = "learner: activation checkpointing of the trained models"
_COMPILE = "forward pass of the learner: torch.compile"
_SCHEDULE = "schedule: when to log, evaluate and save; counted in iterations"
_CHECKPOINT = "checkpoints"
_HUB = "hub: upload of the model and its card"
_DEVICE = "setup of device and processes (TrainingArguments)"
_SCRIPT = "command line and scripts"

_COMPILE_MODES = Literal[
    "default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
_COUNT = Interval(ge=1)
_STEPS = Interval(ge=0, le=MOST)
_LOADER = "prompts are tokenized once and kept in memory, without a data loader"


def _same(entry: Inherited, *names: str) -> dict[str, Inherited]:
    return dict.fromkeys(names, entry)


INHERITED: dict[str, Inherited] = {
    "output_dir": ActsIn("checkpoints, completions, plots and logs are written there"),
    **_same(ActsIn(_BATCH, _COUNT), "per_device_train_batch_size", "gradient_accumulation_steps"),
    "num_train_epochs": ActsIn(_BATCH, Interval(ge=0, le=MOST)),
    "max_steps": ActsIn(_BATCH, Interval(ge=-1, le=MOST)),
    **_same(
        ActsIn(_LEARNER, resume=True),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "optim", "optim_args"),
    ),
    **_same(
        ActsIn(_LEARNER, Interval(ge=0), resume=True),
        *("learning_rate", "weight_decay", "adam_epsilon"),
    ),
    **_same(ActsIn(_LEARNER, Interval(ge=0, lt=1), resume=True), "adam_beta1", "adam_beta2"),
    "warmup_steps": ActsIn(_LEARNER, _STEPS, resume=True),
    "warmup_ratio": ActsIn(_LEARNER, Interval(ge=0, lt=1), resume=True),  # early 5.x releases
    "max_grad_norm": ActsIn(
        "learner: gradient clipping per model; 0 turns it off, the norm is logged",
        Interval(ge=0, le=math.inf),
        float | None,
        resume=True,
    ),
    "optim_target_modules": Unsupported(
        "only GaLore and APOLLO read it, and they are not supported"
    ),
    "average_tokens_across_devices": Unsupported(
        "every loss is normalized over the tokens of all ranks"
    ),
    "label_smoothing_factor": Unsupported("there are no labels"),
    **_same(ActsIn("learner: autocast; weights stay float32", resume=True), "bf16", "fp16"),
    **_same(
        NoEffect("evaluation runs at the precision of training"),
        *("bf16_full_eval", "fp16_full_eval"),
    ),
    **_same(
        ActsIn(_CHECKPOINTING, resume=True),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    ),
    **_same(ActsIn(_COMPILE), "torch_compile", "torch_compile_backend"),
    "torch_compile_mode": ActsIn(_COMPILE, accepts=_COMPILE_MODES | None),
    **_same(
        NoEffect("log-probabilities already come from a kernel that never materializes the logits"),
        *("use_liger_kernel", "liger_kernel_config"),
    ),
    "use_cache": NoEffect("sampling always has a KV cache, and training passes need none"),
    "neftune_noise_alpha": Unsupported(
        "noise in the embeddings would make the probability ratio meaningless"
    ),
    "torch_empty_cache_steps": ActsIn(
        "loop: iterations between releases of cached device memory", _COUNT
    ),
    "auto_find_batch_size": Unsupported(
        "the batch size cannot change during a run; `kedge plan ppo` estimates memory beforehand",
        "lower per_device_train_batch_size and raise gradient_accumulation_steps",
    ),
    **_same(
        ActsIn(_SCHEDULE),
        *("logging_strategy", "logging_first_step", "eval_strategy", "eval_on_start"),
        "save_strategy",
    ),
    **_same(ActsIn(_SCHEDULE, _STEPS), "logging_steps", "eval_steps", "eval_delay", "save_steps"),
    "logging_nan_inf_filter": NoEffect("non-finite values are logged as they are"),
    "log_on_each_node": ActsIn("process: which ranks use log_level"),
    "log_level": ActsIn("process: verbosity of the ranks that log"),
    "log_level_replica": ActsIn("process: verbosity of the other ranks"),
    "include_num_input_tokens_seen": ActsIn(
        "trackers: num_input_tokens_seen is logged",
        accepts=Literal["all", "non_padding", "no"] | bool,
    ),
    "disable_tqdm": ActsIn("progress bar"),
    **_same(
        ActsIn("trackers"),
        *("report_to", "run_name", "project"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    ),
    "per_device_eval_batch_size": ActsIn("evaluation: prompts per rank at a time", _COUNT),
    **_same(
        Unsupported(
            "evaluation samples responses and scores them with the reward; there are no predictions"
            " or labels to gather"
        ),
        *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
        *("include_for_metrics", "batch_eval_metrics", "label_names"),
    ),
    "eval_accumulation_steps": NoEffect("evaluation gathers scores, not predictions"),
    "save_only_model": ActsIn("checkpoints: without optimizer state, cannot be resumed"),
    "save_total_limit": ActsIn(_CHECKPOINT, _COUNT),
    "save_on_each_node": NoEffect(
        "rank 0 writes each checkpoint once; put output_dir on a file system that all nodes share"
    ),
    "enable_jit_checkpoint": Unsupported(
        "a killed run always leaves its last checkpoint complete", "lower save_steps instead"
    ),
    **_same(
        ActsIn(_HUB), "push_to_hub", "hub_token", "hub_model_id", "hub_strategy", "hub_revision"
    ),
    "hub_private_repo": ActsIn(f"{_HUB}; unset is private"),
    "hub_always_push": NoEffect("training waits for every upload, so none is skipped"),
    **_same(
        ActsIn("checkpoints: choice of the best, by an evaluation metric"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    "ignore_data_skip": NoEffect(
        "the order of prompts depends only on seed and iteration, so resuming is exact"
    ),
    "restore_callback_states_from_checkpoint": ActsIn(_CHECKPOINT),
    "full_determinism": ActsIn("process: deterministic kernels"),
    "seed": ActsIn("every random number generator", Interval(ge=0, le=2**32 - 1), resume=True),
    "data_seed": ActsIn(
        "prompts: their order; the default is seed", Interval(ge=0, le=2**62), resume=True
    ),
    **_same(ActsIn(_DEVICE), "use_cpu", "ddp_backend"),
    "tf32": ActsIn(_DEVICE, resume=True),
    "fsdp_config": ActsIn(_DEVICE, accepts=dict[str, Any] | JSONFile | None),
    "deepspeed": ActsIn(_DEVICE, accepts=dict[str, Any] | Text | None),
    "ddp_timeout": ActsIn(_DEVICE, Interval(ge=1, le=SECONDS)),
    "fsdp": ActsIn(_DEVICE, accepts=bool | Literal[""] | str | list[str] | None),
    "accelerator_config": ActsIn(
        f"{_DEVICE}; its options for data loaders have no effect",
        accepts=dict[str, Any] | JSONFile | AcceleratorConfig | None,
    ),
    "parallelism_config": Unsupported(
        "tensor and context parallel training are not supported", "use FSDP2 or DeepSpeed ZeRO"
    ),
    **_same(
        NoEffect(_LOADER),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        "dataloader_in_order",
    ),
    "dataloader_pin_memory": NoEffect(_LOADER, also=(False,)),
    "remove_unused_columns": ActsIn(
        "prompts: True drops dataset columns that no reward function takes; False keeps all",
        resume=True,
    ),
    "train_sampling_strategy": Unsupported(
        "shuffle_dataset sets the order of prompts", "set shuffle_dataset"
    ),
    "length_column_name": Unsupported("prompts are not grouped by length"),
    **_same(
        NoEffect("gradients are summed once per optimizer step, without DistributedDataParallel"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
        *("ddp_broadcast_buffers", "ddp_static_graph"),
    ),
    "debug": Unsupported("its hooks are for transformers.Trainer", also=([], None)),
    "skip_memory_metrics": ActsIn("trackers: False logs the peak memory of each iteration"),
    "do_train": ActsIn(f"{_SCRIPT}: do_eval without do_train only evaluates"),
    "do_eval": ActsIn(f"{_SCRIPT}: evaluate at the end"),
    "do_predict": Unsupported("there is no prediction loop", "set do_eval=True"),
    "resume_from_checkpoint": ActsIn("train(): default of its argument", accepts=str | bool | None),
    "local_rank": ActsIn(
        "accepted from launchers; their environment variables decide", Interval(ge=-1)
    ),
}

# Names before transformers 5.
REMOVED: dict[str, Foreign] = {
    "per_gpu_train_batch_size": Alias("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Alias("per_device_eval_batch_size"),
    "warmup_ratio": Alias("warmup_steps", default=0.0, limits=Interval(ge=0, lt=1)),
    "no_cuda": Alias("use_cpu", default=False),
    "adafactor": Alias("optim", lambda on: "adafactor" if on else "adamw_torch_fused", False),
    "push_to_hub_model_id": Alias("hub_model_id"),
    "push_to_hub_token": Alias("hub_token"),
    "torchdynamo": Alias("torch_compile_backend"),
    **unsupported(
        "apex is not supported; mixed precision uses torch autocast",
        "set bf16=True or fp16=True",
        **{"fp16_opt_level": "O1", "half_precision_backend": "auto", "fp16_backend": "auto"},
    ),
    **unsupported("loading pickled weights can run code", save_safetensors=True),
    **unsupported(
        "it moved into fsdp_config",
        "set it there",
        fsdp_min_num_params=0,
        fsdp_transformer_layer_cls_to_wrap=None,
    ),
    **unsupported("rows are packed without padding instead", group_by_length=False),
    **unsupported(
        "it is part of the repository name",
        'set hub_model_id="organization/name"',
        push_to_hub_organization=None,
    ),
    **unsupported(
        "transformers 5 removed it, and Kedge does not have it",
        **{"use_mps_device": False, "jit_mode_eval": False, "tpu_num_cores": None},
        **{"tpu_metrics_debug": False, "use_legacy_prediction_loop": False, "past_index": -1},
        **{"include_inputs_for_metrics": False, "mp_parameters": "", "ray_scope": "last"},
    ),
    "include_tokens_per_second": NoEffect("tokens per second are always logged", False, (True,)),
}
_STILL_FIELDS = {f.name for f in fields(TrainingArguments)}  # in the installed release
TRANSFORMERS4 = {name: entry for name, entry in REMOVED.items() if name not in _STILL_FIELDS}

# Names that every trainer of TRL has or had.
TRL: dict[str, Foreign] = {
    **TRANSFORMERS4,
    "keep_sampling_mask": NoEffect(
        "training is always over the tokens that top_k, top_p and min_p allowed", False, (True,)
    ),
    **no_effect("responses are always sampled with full weights", ds3_gather_for_generation=True),
}
# Names of RLOOTrainer and GRPOTrainer from TRL 0.22 on.
TRL_GROUPS: dict[str, Foreign] = {
    **TRL,
    **unsupported("dropout would make the probability ratio random", disable_dropout=True),
    **unsupported(
        "there is no load-balancing loss for mixtures of experts", router_aux_loss_coef=None
    ),
    **unsupported(
        "sampling would use another distribution than training",
        repetition_penalty=1.0,
        vllm_structured_outputs_regex=None,
    ),
    **no_effect("rows are packed without padding", pad_to_multiple_of="auto"),
    **no_effect(
        "transformers does not sample here; Kedge's rollout engine or vLLM does",
        cache_implementation=None,
        use_transformers_continuous_batching=False,
        transformers_continuous_batching_config=None,
        use_transformers_paged=False,
    ),
    **no_effect(
        "weights are sent to a server as files (weight_sync_folder)", vllm_group_port=51216
    ),
    **no_effect("prompts are text only", log_multimodal=True),
}
TRL_RLOO: dict[str, Foreign] = {
    **TRL_GROUPS,
    "whiten_rewards": Unsupported(
        "RLOO has one reward per response", "set normalize_reward=True", default=False
    ),
}
TRL_GRPO: dict[str, Foreign] = {
    **TRL_GROUPS,
    "vllm_importance_sampling_cap": Alias("vllm_importance_sampling_clip_max"),
    "cast_lm_head_to_fp32": NoEffect("training logits are always float32", False, (True,)),
    **unsupported("the loss always covers every token", top_entropy_quantile=1.0),
    "off_policy_mask_threshold": Unsupported(
        "sampler_correction handles off-policy responses", "set sampler_correction instead"
    ),
    **unsupported(
        "this loss is not implemented",
        **{"sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0},
        **{"vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    ),
}

_batch = partial(option, acts_in=_BATCH)
_loading = partial(option, acts_in="loading of models and tokenizers given by name")
_reference = partial(option, acts_in="reference: moves towards the policy", resume=True)
_tables = partial(option, acts_in="tables of completions")
_vllm = partial(
    option, acts_in="rollout engine: converted to rollout_engine and its options", resume=True
)


@dataclass
class NewerArguments:
    """Options of TRL 0.22 and later that act, with the defaults of TRL 1.16."""

    steps_per_generation: int | None = _batch(
        None,
        "Micro-batches per rank in one iteration: per_device_train_batch_size x this responses, in "
        "this / gradient_accumulation_steps mini-batches.",
        ge=1,
    )
    generation_batch_size: int | None = _batch(
        None, "Responses per iteration over all ranks; replaces steps_per_generation.", ge=1
    )
    log_completions: bool | None = option(
        None,
        "False: no tables of completions. Otherwise num_sample_generations of them.",
        acts_in="schedule: False shows no tables",
    )
    num_completions_to_print: int | None = _tables(
        None, "Rows of each printed table of completions. Unset: 5.", ge=1
    )
    log_unique_prompts: bool = _tables(
        False, "Show one response per prompt in tables of completions."
    )
    model_init_kwargs: dict[str, Any] | str | None = _loading(
        None,
        "Extra arguments of from_pretrained for policy and reference given by name; JSON on the "
        "command line.",
    )
    trust_remote_code: bool = _loading(False, "Run the custom code of a model given by name.")
    generation_kwargs: dict[str, Any] | str | None = option(
        None,
        "Only {'stop': strings}, which means stop_strings.",
        acts_in="sampling: converted to stop_strings",
        resume=True,
    )
    sync_ref_model: bool = _reference(
        False, "Move the reference towards the policy every ref_model_sync_steps iterations."
    )
    ref_model_mixup_alpha: float = _reference(
        0.6, "Share of the policy in the new reference; the rest is the old one.", gt=0, le=1
    )
    ref_model_sync_steps: int = _reference(512, "See sync_ref_model.", ge=1)
    use_vllm: bool = _vllm(False, "Sample with vLLM; see vllm_mode.")
    vllm_mode: Literal["colocate", "server"] = _vllm(
        "colocate", "colocate: vLLM in this process; server: a running vLLM server."
    )
    vllm_model_impl: str = _vllm("vllm", "model_impl of vllm_engine_args.")
    vllm_enable_sleep_mode: bool = _vllm(False, "Newer name of vllm_sleep.")
    vllm_server_base_url: str | None = _vllm(None, "URL of a running vllm serve.")
    vllm_server_host: str = _vllm("0.0.0.0", "Host of vllm serve, if no URL is set.")
    vllm_server_port: int = _vllm(8000, "Port of vllm serve, if no URL is set.", ge=1, le=65535)
    vllm_server_timeout: float = _vllm(
        240.0, "Newer name of worker_start_timeout.", gt=0, le=SECONDS
    )
    vllm_gpu_memory_utilization: float = _vllm(
        0.3, "gpu_memory_utilization of vllm_engine_args.", gt=0, le=1
    )
    vllm_max_model_length: int | None = _vllm(None, "max_model_len of vllm_engine_args.", ge=1)

    def _fill_defaults(self) -> None:
        super()._fill_defaults()  # type: ignore[misc]
        if self.log_completions is False:
            self.num_sample_generations = 0


_VLLM = {
    f.name: default_of(f)
    for f in fields(NewerArguments)
    if f.name.startswith(("use_vllm", "vllm_"))
}
# Options that are converted to others when a config is built.
CONVERTED = ("steps_per_generation", "generation_batch_size", "generation_kwargs", *_VLLM)


def convert_newer(c: Any) -> None:
    """Convert options of TRL that are not plain aliases to those of Kedge."""
    _convert_sizes(c)
    _convert_vllm(c)
    kwargs = read_mapping(c.generation_kwargs)
    stop = kwargs.pop("stop", None)
    if kwargs:
        raise ConfigError(
            f"generation_kwargs={format_value(kwargs)}: sampling would use another distribution"
            " than training; only stop is supported, leave the rest out"
        )
    if stop is not None:
        c.stop_strings = [stop] if isinstance(stop, str) else list(stop)
    c.generation_kwargs = None


def _convert_sizes(c: Any) -> None:
    steps, rows = c.steps_per_generation, c.generation_batch_size
    if steps is None and rows is None:
        return
    if steps is not None and rows is not None:
        raise ConfigError(
            f"steps_per_generation={steps} and generation_batch_size={rows} both set the size of"
            " a batch; set one of them"
        )
    name = "steps_per_generation" if rows is None else "generation_batch_size"
    accumulation, micro = c.gradient_accumulation_steps, 1
    if rows is not None:
        micro = c.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    whole = steps if rows is None else rows
    if whole % (micro * accumulation):
        size = "" if rows is None else f"per_device_train_batch_size x world size = {micro}, x "
        raise ConfigError(
            f"{name}={whole} must be a multiple of {size}gradient_accumulation_steps={accumulation}"
        )
    c.gradient_accumulation_steps = whole // micro
    c.num_mini_batches = c.gradient_accumulation_steps // accumulation
    c.steps_per_generation = c.generation_batch_size = None


def _convert_vllm(c: Any) -> None:
    if not c.use_vllm:
        unread = [f"{n}={x!r}" for n, default in _VLLM.items() if (x := getattr(c, n)) != default]
        if unread:
            logger.warning("%s has no effect without use_vllm=True", ", ".join(unread))
        vars(c).update(_VLLM)
        return
    if c.rollout_engine != "embedded":
        raise ConfigError(
            f"use_vllm=True and rollout_engine={c.rollout_engine!r} are both set; set one of them"
        )
    if c.vllm_mode == "server":
        address = f"http://{c.vllm_server_host}:{c.vllm_server_port}"
        c.rollout_engine = c.vllm_server_base_url or address
        c.worker_start_timeout = c.vllm_server_timeout
    else:
        c.rollout_engine = "vllm"
        c.vllm_sleep = c.vllm_enable_sleep_mode
        from_trl = {
            "gpu_memory_utilization": c.vllm_gpu_memory_utilization,
            "max_model_len": c.vllm_max_model_length,
            "model_impl": None if c.vllm_model_impl == "vllm" else c.vllm_model_impl,
        }
        given = engine_args(c.vllm_engine_args)
        c.vllm_engine_args = {k: v for k, v in from_trl.items() if v is not None} | dict(given)
    vars(c).update(_VLLM)
