"""What other libraries call an option or an argument, for messages about unknown names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kedge.config.declare import NoEffect, Unsupported, format_value
from kedge.config.dialect import Alias
from kedge.records.errors import ConfigError

Names = dict[str, Any]

# Names of one option in Kedge and in current and older releases of other libraries.
ALIASES = (
    ("num_ppo_epochs", "ppo_epochs", "num_iterations", "noptepochs", "update_epochs"),
    ("num_generations", "rloo_k", "number_samples_per_prompt", "n_samples_per_prompt", "rollout.n"),
    ("num_train_epochs", "epochs"),
    ("learning_rate", "lr"),
    ("lora_r", "lora_rank"),
    ("total_episodes", "episodes", "steps", "num_episodes"),
    ("kl_coef", "init_kl_coef", "beta"),
    ("kl_estimator", "kl_penalty"),
    ("adaptive_kl", "adap_kl_ctrl"),
    ("kl_target", "target"),
    ("kl_horizon", "horizon"),
    ("cliprange", "epsilon", "eps_clip", "clip_range"),
    ("cliprange_high", "epsilon_high"),
    ("cliprange_value", "value_clip", "clip_range_vf"),
    ("lam", "lambd", "gae_lambda"),
    ("normalize_advantage", "normalize_advantages"),
    ("response_length", "max_completion_length", "max_new_tokens", "generate_max_len"),
    ("max_prompt_length", "max_prompt_token_length", "prompt_max_len"),
    ("min_new_tokens", "min_response_length"),
    ("non_eos_penalty", "non_stop_penalty"),
    ("local_rollout_forward_batch_size", "forward_batch_size", "micro_rollout_batch_size"),
    ("report_to", "log_with"),
    ("project", "tracker_project_name"),
    ("torch_empty_cache_steps", "optimize_device_cache", "optimize_cuda_cache"),
    ("value_learning_rate", "critic_learning_rate", "critic_lr"),
    ("value_warmup_steps", "freezing_actor_steps"),
    ("vllm_structured_outputs_regex", "vllm_guided_decoding_regex"),
    ("processing_class", "tokenizer"),
    ("args", "config"),
    ("model", "model_name_or_path", "policy", "model_name", "model_path", "pretrain"),
    ("train_dataset", "dataset_name", "dataset", "prompt_data"),
    ("ref_model", "ref_policy"),
    ("reward_processing_class", "reward_processing_classes"),
    ("model_adapter_name", "adapter_name"),
    ("train_layers", "num_layers_unfrozen", "num_unfrozen_layers", "unfreeze_layers"),
)


def unsupported(reason: str, way_out: str = "leave it at its default", /, **defaults: Any) -> Names:
    """Rows for names that are refused unless they have these defaults."""
    return {n: Unsupported(reason, default, way_out=way_out) for n, default in defaults.items()}


def no_effect(reason: str, **defaults: Any) -> Names:
    """Rows for names without effect, with the defaults that log nothing."""
    return {name: NoEffect(reason, default) for name, default in defaults.items()}


def _warmup(share: Any) -> Any:
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"warmup_ratio={format_value(share)} must be at least 0 and below 1")
    return share


# Names of transformers 4 that transformers 5 removed.
REMOVED: Names = {
    "per_gpu_train_batch_size": Alias("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Alias("per_device_eval_batch_size"),
    "evaluation_strategy": Alias("eval_strategy"),
    "warmup_ratio": Alias("warmup_steps", _warmup, 0.0),
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
        **{"fsdp_min_num_params": 0, "fsdp_transformer_layer_cls_to_wrap": None},
    ),
    **unsupported(
        "it moved into accelerator_config",
        "leave it out",
        dispatch_batches=None,
        split_batches=None,
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
        **{"use_ipex": False, "sharded_ddp": "", "no_deprecation_warning": False},
    ),
    "include_tokens_per_second": NoEffect("tokens per second are always logged", False, (True,)),
}


def advice(config: str, name: str) -> str:
    """Where a config takes a name that ``kedge.<config>`` does not know; "" if nowhere."""
    if not config:  # flags of a command
        return ""
    from kedge.ext.trl import options

    theirs = getattr(options, config, None)
    known = theirs is not None and name in {f.name for f in fields(theirs)}
    return "; kedge.trl takes TRL's names" if known else ""


def suggest(config: str, name: str) -> tuple[tuple[str, ...], str]:
    """All names of the option that ``name`` is one of, and where a config takes it."""
    removed = REMOVED.get(name)
    if isinstance(removed, Alias):
        return (removed.target,), ""
    if removed is not None:
        return (), f"; {removed.reason}"
    return next((group for group in ALIASES if name in group), ()), advice(config, name)
